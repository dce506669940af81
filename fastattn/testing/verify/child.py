"""Child process that runs cases, so that it can be killed when a kernel hangs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ...ops import attention_ops, call
from ..budget import PastBudget
from ..inputs import nan_filled_empty
from ..supervision import PREPARES, RUNS, Tell, log, reason, talk
from .case import Case, Setting, Subject
from .cases import FAMILIES
from .verdicts import CRASH, NO_COMPILE, RIGHT, UNSERVED, WRONG, Outcome


def main() -> None:
    """Run jobs until stdin ends; the argument is the device."""
    device = torch.device(sys.argv[1])
    talk(lambda tell, jobs: serve(device, tell, jobs))


def serve(device: torch.device, tell: Tell, jobs: Iterable[Any]) -> None:
    """Run jobs, each a subject and names of cases; raise an error if the device is lost."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    tell(ready=True)
    with telling_of_compilations(tell):
        for subject, names in jobs:
            run(Subject(*subject), names, device, tell)
            tell(done=True)


@contextmanager
def telling_of_compilations(tell: Tell) -> Iterator[None]:
    """Tell when Triton compiles a kernel, which takes long and is no hang, and when it has."""
    from triton import compiler

    compiles = compiler.compile

    def told(*arguments: Any, **how: Any) -> Any:
        tell(doing=PREPARES)
        try:
            return compiles(*arguments, **how)
        finally:
            tell(doing=RUNS)

    with mock.patch.object(compiler, "compile", told):
        yield


def run(subject: Subject, names: Iterable[str], device: torch.device, tell: Tell) -> None:
    """Run cases of a subject, by name, and report each."""
    cases = {case.name: case for case in FAMILIES[subject.backend][subject.family]()}
    for name in names:
        # The interpreter is slow, and its kernels cannot hang.
        tell(at=name, doing=RUNS if device.type == "cuda" else PREPARES)
        result = outcome(cases[name], Setting(subject, device))
        tell(outcome=result)
        if result.verdict == CRASH and device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the CUDA context is lost


def outcome(case: Case, setting: Setting) -> Outcome:
    """Run a case and return its outcome."""
    result = _checked_outcome(case, setting)
    if not attention_ops.uncompiled:
        return result
    # Other kernels served this call or the one before.
    why = attention_ops.uncompiled[0]
    attention_ops.uncompiled.clear()
    return Outcome(case.name, NO_COMPILE, None, why)


def _checked_outcome(case: Case, setting: Setting) -> Outcome:
    try:
        with warnings.catch_warnings(), nan_filled_empty():
            warnings.simplefilter("ignore")
            share = case.check(setting)
        return Outcome(case.name, RIGHT, share, "")
    except PastBudget as error:
        return Outcome(case.name, WRONG, error.share, str(error))
    except AssertionError as error:
        return Outcome(case.name, WRONG, None, str(error) or "an assertion of the case failed")
    except torch.OutOfMemoryError as error:
        return Outcome(case.name, UNSERVED, None, reason(error))
    except Exception as error:
        if isinstance(error, ValueError) and " cannot serve this call" in str(error):
            return Outcome(case.name, UNSERVED, None, str(error))
        log(case.name, error)
        verdict = NO_COMPILE if call.from_compiler(error) else CRASH
        return Outcome(case.name, verdict, None, reason(error))
