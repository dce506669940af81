"""`Implementation`: an implementation of attention in the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .case import Case
from .inputs import Inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unserved(Exception):
    """Raised by `prepare`: the implementation cannot serve the case; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    Args:
        name: unique, for tables.
        serves: reason that it cannot serve a case, by sizes alone, or None.
        prepare: makes a function from q, k, v to o, differentiable if the case has a backward;
            raises `Unserved` for reasons that depend on the tensors.
        slow_to_prepare: compiles for seconds at each new shape.
        check: checks o against another bound than the error budget; raises AssertionError.
    """

    name: str
    serves: Callable[[Case], str | None]
    prepare: Callable[[Case, Inputs], Attention]
    slow_to_prepare: bool = False
    check: Callable[[Case, Inputs, Tensor], None] | None = None

    def why_not(self, case: Case) -> str | None:
        """Reason by `serves`, or that the case excludes slow peers; None if it serves."""
        if self.slow_to_prepare and not case.slow_peers:
            return "compiles for long: measured at some of the sizes of this set only"
        return self.serves(case)
