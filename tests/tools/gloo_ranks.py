"""Functions on several ranks, processes of a gloo group on the CPU: to run, to count, to fail."""

import errno
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.testing.compiling.named_functions import load_function

# Ranks that wait for one that has failed wait no longer.
_TIMEOUT = timedelta(minutes=3)
# The longest call in seconds: gloo's thread can spin in a buffer's destructor, past every timeout.
LONGEST = 480.0
# What a server of processes imports once, and those that it forks need not: it starts no threads.
_IMPORTED = (
    "fastattn.testing.compare",
    "fastattn.training.trainer",
    "torch.distributed.tensor.parallel",
)


def run_ranks(function: str, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Call a function on every rank of a gloo group of new processes.

    Args:
        function: its name, as in `load_function`. The processes inherit the environment; of what
            Triton reads when it is imported, that of the first call.
        world_size: how many processes.
        kwargs: of the call, the same for every rank. Arguments and results must be picklable.

    Returns:
        The results, by rank. The first error of a rank is raised; ranks that hang are killed.
    """
    others = {*multiprocessing.active_children()}
    with tempfile.TemporaryDirectory() as folder, _processes(world_size) as pool:
        store = (Path(folder) / "store").as_uri()
        ranks = [
            pool.submit(_run, function, store, r, world_size, kwargs) for r in range(world_size)
        ]
        done, hanging = wait(ranks, LONGEST)
        for process in {*multiprocessing.active_children()} - others if hanging else ():
            process.kill()
        assert not hanging, f"{len(done)} of {world_size} ranks ended within {LONGEST} s"
        return [rank.result() for rank in ranks]


def run_alone(function: str, **kwargs: Any) -> Any:
    """Call a function in one new process, which has no group and may fork; as `run_ranks`."""
    with _processes(1) as pool:
        return pool.submit(_call, function, kwargs).result()


def wrong_calls(seeds: Iterable[int], judge: Callable[[int], None]) -> list[str]:
    """Judge calls by their seeds on this rank; return failures. Other errors end the rank."""
    wrong = []
    for seed in seeds:
        try:
            judge(seed)
        except AssertionError:
            wrong.append(f"seed {seed}: {traceback.format_exc()}")
        except Exception:
            sys.stderr.write(f"seed {seed} on rank {torch.distributed.get_rank()}\n")
            raise
    return wrong


def _call(function: str, kwargs: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    return load_function(function)(**kwargs)


def _processes(count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return ProcessPoolExecutor(count, context, _inherit, (dict(os.environ),))


def _inherit(environment: dict[str, str]) -> None:
    """Instead of the server's, which is as old as the first call."""
    os.environ.clear()
    os.environ.update(environment)


def _run(function: str, store: str, rank: int, world_size: int, kwargs: dict[str, Any]) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    try:
        return _call(function, kwargs)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def full_disk(writer: type, name: str, rank: int) -> Iterator[None]:
    """In the block this rank's disk is full when it comes to the method `name` of `writer`."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if torch.distributed.get_rank() != rank:
        yield
        return
    with mock.patch.object(writer, name, full):
        yield


# Of what a rank has of a collective's input, how much it sends in a group of n ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "send": lambda n: 1,
    "_allgather_base_": lambda n: n - 1,
    **dict.fromkeys(("alltoall_base_", "_reduce_scatter_base_"), lambda n: (n - 1) / n),
    # The functional one, of DTensors, too.
    **dict.fromkeys(("allreduce_", "all_reduce"), lambda n: 2 * (n - 1) / n),
}
# Those that send nothing.
_SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd")
_INPUTS = ("input", "input_tensor", "tensors")


class CountMessages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In force, counts what this rank sends by torch.distributed.

    Attributes:
        calls: by a group's ranks, sends and collectives.
        sent: by a group's ranks, bytes that a rank sends by them at least.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[int, ...]] = Counter()
        self.sent: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _SILENT:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            group = _group(given)
            (tensors,) = (given[name] for name in _INPUTS if name in given)
            tensors = [tensors] if isinstance(tensors, Tensor) else tensors
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            self.calls[ranks] += 1
            share = _SENT[func._opname](len(ranks))
            self.sent[ranks] += share * sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def _group(given: dict[str, Any]) -> ProcessGroup:
    """Find the process group in a collective's arguments; functional ones have its name."""
    if "process_group" in given:
        return ProcessGroup.unbox(given["process_group"])
    return _resolve_process_group(given["group_name"])
