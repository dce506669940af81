"""What failed: whole for a log, in a line for a report; and whether the device survived it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

# The exit code of a process that ends because its device is lost: a new one may go on.
LOST = 3
_MOST = 400  # characters of a reason
_BEGINNING = 120


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can be measured in this process.

    Args:
        implementation: who broke it.
        reason: what it raised.
    """

    def __init__(self, implementation: str, reason: str) -> None:
        super().__init__(f"{implementation}: {reason}")
        self.implementation, self.reason = implementation, reason


def raise_if_lost(error: Exception, who: str, synchronize: Callable[[], object]) -> None:
    """After an illegal access every later call fails: find out before blaming the others.

    Args:
        error: what was raised.
        who: by whom.
        synchronize: waits for the device, which raises if that is lost.

    Raises:
        DeviceLost: it is.
    """
    try:
        synchronize()
    except Exception as broken:
        log(who, error)
        raise DeviceLost(who, reason(error)) from broken


def reason(error: BaseException) -> str:
    """An error in a line: its type, and of a long message the beginning and the end.

    What a compiler says begins with the place and ends with the cause.
    """
    text = " ".join(str(error).split())
    if len(text) > _MOST:
        text = f"{text[:_BEGINNING]} ... {text[_BEGINNING - _MOST :]}"
    return f"{type(error).__name__}: {text}"


def log(where: str, error: BaseException) -> None:
    """Write an error with its traceback to stderr, which in a full run is the log."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"\n{where}:\n{''.join(lines)}")
    sys.stderr.flush()
