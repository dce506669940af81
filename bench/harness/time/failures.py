"""Outcomes of implementations: statuses of records, failures and their log, lost devices."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..cases.inputs import Unserved

TIMED, UNSERVED, WRONG = "timed", "cannot serve", "wrong"
FAILED, NO_MEMORY = "failed", "out of memory"
# Exit code of a process whose CUDA context is lost; a new process can continue.
LOST = 3
_MOST, _BEGINNING = 400, 120  # characters of a reason, and of its start if it is longer


class Failure(NamedTuple):
    """Why an implementation was not timed; status: one of the names above."""

    status: str
    reason: str


class DeviceLost(RuntimeError):
    """An implementation broke the CUDA context; this process cannot continue."""

    def __init__(self, implementation: str, reason: str) -> None:
        super().__init__(f"{implementation}: {reason}")
        self.implementation, self.reason = implementation, reason


def failure(error: Exception, who: str, synchronize: Callable[[], object]) -> Failure:
    """The failure of `who` by an error, which the log has whole if it is unexpected.

    Raises:
        DeviceLost: `synchronize` raises, since the CUDA context is lost.
    """
    text = reason(error)
    try:
        synchronize()
    except Exception as broken:
        log(who, error)
        raise DeviceLost(who, text) from broken
    _, _, message = text.partition(": ")
    if isinstance(error, Unserved) or "cannot serve this call" in text:
        return Failure(UNSERVED, message)
    if isinstance(error, torch.OutOfMemoryError):
        release()
        return Failure(NO_MEMORY, message)
    log(who, error)
    return Failure(WRONG, message) if isinstance(error, AssertionError) else Failure(FAILED, text)


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


def release() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()
