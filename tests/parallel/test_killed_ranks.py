"""A rank that is killed in the middle of a call is an error on the others, and no hang."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastattn.parallel import ContextPlan, context_attention, gather, ring, shard
from fastattn.testing import make_qkv

# Gloo's part of it is others' to test, and waits for timeouts take long.
pytestmark = pytest.mark.nightly

RANKS = 3
TIMEOUT = timedelta(seconds=10)  # of a message


def die_at(module: Any, name: str, call: int) -> None:
    """Kill this process when it calls a function of a module for that many times."""
    function, calls = getattr(module, name), []

    def counted(*given: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)

    setattr(module, name, counted)


def attend(method: str) -> torch.Tensor:
    world = dist.group.WORLD
    plan = ContextPlan.make(48, world.size(), block=8)
    # Leaves: no gradient of theirs sends messages.
    whole = make_qkv(1, 6, 6, 48, D=8, requires_grad=False)
    own = [shard(x, 2, plan, world).requires_grad_() for x in whole]
    return context_attention(*own, mesh=world, plan=plan, method=method)


def in_a_ring(dies: bool) -> None:
    if dies:  # the keys of another rank are here, and its own on their way
        die_at(ring, "part_forward", 2)
    # A rank that has got all keys before may only hear of it in the backward.
    attend("ring").sum().backward()


def in_the_backward(dies: bool) -> None:
    o = attend("gather")
    if dies:  # keys are gathered again, and their gradients are awaited
        die_at(gather, "part_backward", 1)
    o.sum().backward()


# Of each the last rank dies; the others go on to the next, as a group of their own.
CALLS = (in_a_ring, in_the_backward)


def run(rank: int, path: str) -> None:
    """Makes the calls, and writes down what each has raised."""
    folder = Path(path)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), -1)
    for n, call in enumerate(CALLS):
        size = RANKS - n
        # Processes start as fast as the machine lets them: the timeout is for messages.
        store.add(f"{n} ready", 1)
        while store.add(f"{n} ready", 0) < size:
            sleep(0.02)
        group = dist.PrefixStore(str(n), store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            call(dies=rank == size - 1)
            said = "served"
        except RuntimeError as error:
            said = f"{type(error).__name__}: {error}"
        (folder / f"{call.__name__} {rank}").write_text(said, encoding="utf-8")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With what the ranks have written, when all of them have ended or one hangs."""
    actual = tmp_path_factory.mktemp("ranks")
    call = "import sys; from fastattn.testing.compiling.named_functions import load_function; "
    call += "load_function(sys.argv[1])(int(sys.argv[2]), sys.argv[3])"
    command = [sys.executable, "-c", call, f"{__file__}:run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        ranks = [subprocess.Popen([*command, str(rank), str(actual)]) for rank in range(RANKS)]
        try:
            ended = [rank.wait(timeout=300) for rank in ranks]
            assert ended == [0, -signal.SIGKILL, -signal.SIGKILL]
            yield actual
        finally:
            for rank in ranks:
                rank.kill()


@pytest.mark.parametrize(
    ("call", "rank"), [("in_a_ring", 0), ("in_a_ring", 1), ("in_the_backward", 0)]
)
def test_the_others_raise(call: str, rank: int, folder: Path) -> None:
    said = (folder / f"{call} {rank}").read_text(encoding="utf-8")
    assert said.startswith(("RuntimeError: ", "DistBackendError: ", "DistNetworkError: "))
