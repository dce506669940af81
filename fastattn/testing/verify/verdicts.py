"""Verdicts on kernels: of a case, and of all cases of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from .case import Subject

RIGHT, WRONG, HANG, CRASH, NO_COMPILE = "right", "wrong", "hang", "crash", "no compile"
# No kernel serves the case, or it does not fit in memory; not a finding.
UNSERVED = "unserved"
# Most severe first.
_WORST = (HANG, CRASH, NO_COMPILE, WRONG, RIGHT)


class Outcome(NamedTuple):
    """Outcome of a case.

    share: the worst error as a share of its budget, or None. reason: for every verdict but "right".
    """

    case: str
    verdict: str
    share: float | None
    reason: str


class Finding(NamedTuple):
    """Verdict on the kernels of a backend, family, dtype and class of head dims.

    cases: number run. share: the worst error as a share of its budget; None: not finite, or no
    result. verdict: right, wrong, hang, crash or no compile. case: the worst.
    """

    backend: str
    family: str
    dtype: str
    head_dim: int
    cases: int
    share: float | None
    verdict: str
    case: str
    reason: str

    def __str__(self) -> str:
        name = f"{self.backend} {self.family} {self.dtype} {self.head_dim}"
        if self.verdict == RIGHT:
            return f"{name}: right, {self.cases} case{'s' * (self.cases > 1)}"
        return f"{name}: {self.verdict}: {self.case}: {self.reason}"


Verdict = TypeVar("Verdict", Outcome, Finding)


def finding(subject: Subject, outcomes: Sequence[Outcome]) -> Finding | None:
    """The verdict of a subject's worst case; None if no case was served."""
    served = [x for x in outcomes if x.verdict != UNSERVED]
    if not served:
        return None
    worst = worst_of(served)
    return Finding(*subject, len(served), worst.share, worst.verdict, worst.case, worst.reason)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The most severe outcome or finding."""
    # No share is worse than any share.
    return min(
        verdicts,
        key=lambda x: (_WORST.index(x.verdict), x.share is not None, -(x.share or 0.0)),
    )


def still_holds(stored: dict[str, Any], outcomes: Sequence[Outcome]) -> bool:
    """Whether a stored failure stays valid: these outcomes lack its case."""
    failed = stored["verdict"] != RIGHT and all(x.verdict in (RIGHT, UNSERVED) for x in outcomes)
    return failed and stored["case"] not in {x.case for x in outcomes if x.verdict == RIGHT}
