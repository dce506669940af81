"""Errors of implementations: log, line of the report, lost devices."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

# Exit code of a process whose CUDA context is lost; a new process can continue.
LOST = 3
_MOST, _BEGINNING = 400, 120  # characters of a reason, and of its start if it is longer


class DeviceLost(RuntimeError):
    """An implementation broke the CUDA context; this process cannot continue."""

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
    """An error's type and message in a line; a long one without its middle.

    Compilers' messages begin with the location and end with the cause.
    """
    text = " ".join(str(error).split())
    if len(text) > _MOST:
        text = f"{text[:_BEGINNING]} ... {text[_BEGINNING - _MOST :]}"
    return f"{type(error).__name__}: {text}"


def log(where: str, error: BaseException) -> None:
    """Write an error with its traceback to stderr, the log of a full run."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"\n{where}:\n{''.join(lines)}")
    sys.stderr.flush()
