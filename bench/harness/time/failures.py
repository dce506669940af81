"""Outcomes of implementations: statuses of records, failures and their log, lost devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...testing.supervision import log, reason
from ..cases.inputs import Unserved

TIMED, UNSERVED, WRONG = "timed", "cannot serve", "wrong"
FAILED, NO_MEMORY = "failed", "out of memory"


class Failure(NamedTuple):
    """Why an implementation was not timed; status: one of the names above."""

    status: str
    reason: str


def failure(error: Exception, who: str, synchronize: Callable[[], object]) -> Failure:
    """The failure of `who` by an error, which the log has whole if it is unexpected.

    Raises the error of `synchronize` if the CUDA context is lost: this process cannot continue.
    """
    synchronize()
    text = reason(error)
    _, _, message = text.partition(": ")
    if isinstance(error, Unserved) or "cannot serve this call" in text:
        return Failure(UNSERVED, message)
    if isinstance(error, torch.OutOfMemoryError):
        release()
        return Failure(NO_MEMORY, message)
    log(who, error)
    return Failure(WRONG, message) if isinstance(error, AssertionError) else Failure(FAILED, text)


def release() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()
