"""The rule for a winner: it saves more than 3 % of the time, and both halves of the samples agree.

Times are noisy, and of many candidates the fastest by chance is often one that is not. A candidate
takes the place of the shipped one only if it saves that much in all samples, in those of the first
half of the time, and in those of the second.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MARGIN = 0.03
# Milliseconds of every call, in the order of time, for each case.
Samples = Sequence[Sequence[float]]


class Winner(NamedTuple):
    """A candidate's name, and the share of the shipped one's time that it saves."""

    name: str
    gain: float


def weights(cases: int) -> tuple[int, ...]:
    """Of the causal case, which has half of the pairs, and of the full one if there is one."""
    return (2, 1)[:cases] if cases > 1 else (1,)


def score(samples: Samples) -> float:
    """Weighted medians of all cases."""
    each = zip(weights(len(samples)), samples, strict=True)
    return sum(weight * statistics.median(times) for weight, times in each)


def halves(samples: Samples) -> tuple[Samples, Samples]:
    """The samples of the first half of the time, and of the second."""
    middles = [(len(times) + 1) // 2 for times in samples]
    first = [times[:middle] for times, middle in zip(samples, middles, strict=True)]
    second = [times[-middle:] for times, middle in zip(samples, middles, strict=True)]
    return first, second


def gain(shipped: Samples, other: Samples) -> float:
    """The share of the shipped one's time that another saves."""
    return 1 - score(other) / score(shipped)


def beats(shipped: Samples, other: Samples) -> bool:
    """Whether another takes the place of the shipped one."""
    pairs = zip((shipped, *halves(shipped)), (other, *halves(other)), strict=True)
    return all(gain(ours, its) > MARGIN for ours, its in pairs)


def winner(shipped: Samples, others: Mapping[str, Samples]) -> Winner | None:
    """The fastest of those that beat the shipped one; None: it stays."""
    for name in sorted(others, key=lambda name: score(others[name])):
        if beats(shipped, others[name]):
            return Winner(name, gain(shipped, others[name]))
    return None
