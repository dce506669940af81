"""Failure and restart under torchrun: an error is shown once, and a restarted run resumes.

torchrun's key-value store outlives the processes it starts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

# User errors, which all ranks raise at about the same time.
EXPECTED = (ValueError, OSError, FloatingPointError, ModuleNotFoundError)
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# Seconds that other ranks wait for rank 0 to report, and for torchrun's signal.
_FOR_FIRST, _FOR_END = 2.0, 3.0
# Seconds until all ranks that wait for a silent rank have given up.
_FOR_OTHERS = 5.0


def shown_once(call: Callable[[], int]) -> int:
    """Call a function on every rank; only the rank with the first error raises.

    A torch.distributed timeout becomes a TimeoutError that names the silent ranks.

    Errors other than the user's are passed to torchrun, for its report. The other ranks, whose
    errors follow from the first, print nothing until torchrun ends them.

    Returns:
        The call's result; on the ranks that print nothing, a non-zero exit status.
    """
    try:
        return call()
    except Exception as error:
        silent = _silent(error)
        expected = silent is not None or isinstance(error, EXPECTED)
        if _speaks(expected):
            if silent is not None:
                raise silent from error
            if not expected:
                from torch.distributed.elastic.multiprocessing.errors import record

                def again(error: Exception = error) -> None:
                    raise error

                record(again)()
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FOR_END)
        return getattr(error, "exit_status", 1)


def attempt() -> int:
    """Number of torchrun's restarts of these ranks."""
    return int(os.environ.get(_RESTARTS, "0"))


def begun(out_dir: str) -> None:
    """Record for `restarted` that a run in this folder has begun."""
    if _RESTARTS in os.environ:
        _store("begun").set(out_dir, "yes")


def restarted(out_dir: str) -> bool:
    """Whether torchrun restarted a run that had begun in this folder."""
    return attempt() > 0 and bool(_store("begun").check([out_dir]))


def _silent(error: Exception) -> TimeoutError | None:
    """Name the ranks that a timeout waited for; None for other errors.

    Every rank records its own failure, so that it does not count as silent.
    """
    try:
        store = _store(f"failed after {attempt()} restarts")
        store.set(os.environ["RANK"], "yes")
        if not isinstance(error, RuntimeError) or not _TIMED_OUT.search(str(error)):
            return None
        ranks = [str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        with suppress(RuntimeError):  # some have not
            store.wait(ranks, timedelta(seconds=_FOR_OTHERS))
        missing = [rank for rank in ranks if not store.check([rank])]
    except (RuntimeError, OSError):
        return None  # the process that kept the store is gone
    who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "a rank"
    return TimeoutError(
        f"{who} did not answer in time: stopped, ended or very slow; --timeout says how many "
        "seconds ranks wait for each other"
    )


def _speaks(expected: bool) -> bool:
    """Whether this rank is the first to claim an error."""
    try:
        store = _store(f"first cause after {attempt()} restarts")
        if expected and os.environ["RANK"] != "0":
            try:
                store.wait(["claimed"], timedelta(seconds=_FOR_FIRST))
                return False
            except RuntimeError:
                pass  # rank 0 has no such error
        return bool(store.add("claimed", 1) == 1)
    except (RuntimeError, OSError):
        return True  # the process that kept the store is gone


def _store(purpose: str) -> Any:
    # Not in every build of torch; one process needs none.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_FOR_FIRST)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(f"fastattn/{purpose}", TCPStore(*address, is_master=False, timeout=timeout))
