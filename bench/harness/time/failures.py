"""Errors of implementations: a traceback for the log, a line for the report, and lost devices."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

# Exit code of a process whose CUDA context is lost; a new process can continue.
LOST = 3
_MOST, _BEGINNING = 400, 120  # characters of a reason, and of its start if it is longer


class DeviceLost(RuntimeError):
    """The CUDA context is broken by an implementation; nothing more runs in this process."""

    def __init__(self, implementation: str, reason: str) -> None:
        super().__init__(f"{implementation}: {reason}")
        self.implementation, self.reason = implementation, reason


def raise_if_lost(error: Exception, who: str, synchronize: Callable[[], object]) -> None:
    """Raise `DeviceLost` if an error of `who` has lost the CUDA context.

    synchronize: waits for the device; raises if the context is lost.
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
