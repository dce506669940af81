"""Errors of implementations: a traceback for the log, a line for the report, and lost devices."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

# Exit code of a process whose CUDA context is lost; a new process can continue.
LOST = 3
_MOST = 400  # characters of a reason
_BEGINNING = 120


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can be measured in this process.

    Args:
        implementation: the one that broke it.
        reason: its error.
    """

    def __init__(self, implementation: str, reason: str) -> None:
        super().__init__(f"{implementation}: {reason}")
        self.implementation, self.reason = implementation, reason


def raise_if_lost(error: Exception, who: str, synchronize: Callable[[], object]) -> None:
    """Raise `DeviceLost` if an error has lost the CUDA context, where every later call fails.

    Args:
        error: the error.
        who: the implementation that raised it.
        synchronize: waits for the device; raises if the context is lost.

    Raises:
        DeviceLost: the context is lost.
    """
    try:
        synchronize()
    except Exception as broken:
        log(who, error)
        raise DeviceLost(who, reason(error)) from broken


def reason(error: BaseException) -> str:
    """An error in a line: its type and message, a long one without its middle.

    A compiler's message begins with the location and ends with the cause.
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
