"""Notes of ranks in torchrun's store: whose error is shown, and which run has begun."""

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks

from fastattn.training.distributed import launcher
from fastattn.training.distributed.degrees import SplitError


def speakers(error: Exception, first: int | None, attempt: str) -> int | None:
    """Return a rank's `shown_once`; None where it raises. first: the rank that fails first."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt

    def fail() -> int:
        if first is not None and dist.get_rank() != first:
            launcher._store(f"first cause after {attempt} restarts").wait(["claimed"])
        raise error

    try:
        return launcher.shown_once(fail)
    except type(error):
        return None


def world() -> dict[str, Any]:
    """Which ranks show an error: that of a user on all of them, and one that others follow."""
    first = dist.get_rank() == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if first else None
    port = [0 if store is None else store.port]
    dist.broadcast_object_list(port)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    given |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        patch.setattr(launcher, "_FOR_END", 0.0)
        # Nobody is silent here, however busy the machine is.
        patch.setattr(launcher, "_FOR_FIRST", 60.0)
        results = {
            "of a user": speakers(SplitError("planted"), None, "0"),
            "of one": speakers(RuntimeError("planted"), 2, "1"),
        }
        if first:
            launcher.begun("a")
        dist.barrier()
        results["begun"] = launcher.restarted("a"), launcher.restarted("b")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        results["at first"] = launcher.restarted("a")
        dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(f"{__file__}:world", 4)


def test_an_error_is_shown_by_one_rank(by_rank: list) -> None:
    """The other ranks exit with a status of their own: 2 for wrong options."""
    assert [rank["of a user"] for rank in by_rank] == [None, 2, 2, 2]
    assert [rank["of one"] for rank in by_rank] == [1, 1, None, 1]


def test_what_has_begun_is_known_after_a_restart(by_rank: list) -> None:
    assert [rank["begun"] for rank in by_rank] == [(True, False)] * 4
    assert not any(rank["at first"] for rank in by_rank)
