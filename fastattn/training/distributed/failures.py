"""An error on one rank or on all is shown once: the first, by the rank that met it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import record

# Errors of the user, which all ranks find at about the same time.
EXPECTED = (ValueError, OSError, FloatingPointError, ModuleNotFoundError)
_KEY = "fastattn/first_cause"
# Seconds that others leave rank 0 to speak for all, and that they wait for the launcher's signal.
_FOR_FIRST, _FOR_END = 2.0, 10.0


def shown_once(call: Callable[[], int]) -> int:
    """Calls on every rank, and raises on the one whose error came first.

    torchrun is told of an error that is no user's, for its report. The other ranks, whose errors
    follow from the first or repeat it, stay quiet until torchrun ends them.

    Returns:
        What the call returns; on the ranks that stay quiet, an exit status that is not 0.
    """
    try:
        return call()
    except Exception as error:
        expected = isinstance(error, EXPECTED)
        if _speaks(expected):
            if not expected:
                record(_raiser(error))()
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FOR_END)
        return getattr(error, "exit_status", 1)


def _raiser(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def _speaks(expected: bool) -> bool:
    """Whether this rank is the first to claim an error."""
    try:
        store = PrefixStore(
            f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_FOR_FIRST),
            ),
        )
        if expected and os.environ["RANK"] != "0":
            try:
                store.wait([_KEY], timedelta(seconds=_FOR_FIRST))
                return False
            except RuntimeError:
                pass  # rank 0 has no such error
        return store.add(_KEY, 1) == 1
    except (RuntimeError, OSError):
        return True  # the rank that kept the store is gone
