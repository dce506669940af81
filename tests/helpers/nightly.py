"""Tests and cases that `make test-nightly` runs beside those of the gate.

A case is left to the night if it takes seconds, and others see its faults in another dtype, head
dim, GPU or split. A whole test has the mark `nightly`.
"""

import os
from collections.abc import Collection, Iterable
from typing import TypeVar

_Case = TypeVar("_Case")


def gate_cases(gate: Iterable[_Case], nightly: Iterable[_Case]) -> list[_Case]:
    """Return the cases of the gate, and where FASTATTN_NIGHTLY is 1 the others too."""
    every = os.environ.get("FASTATTN_NIGHTLY") == "1"
    return [*gate, *(nightly if every else ())]


def gate_sets(sets: Collection[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return as few sets as have every name, and those where names meet for the night."""
    left = {name for names in sets for name in names}
    gate: list[tuple[str, ...]] = []
    while left:
        gate.append(max(sets, key=lambda names: len(left.intersection(names))))
        left -= set(gate[-1])
    return gate_cases(gate, (names for names in sets if names not in gate))
