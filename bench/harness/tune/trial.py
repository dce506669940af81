"""A trial of a choice: candidates are checked against the error budget, then timed.

Checks all heads. A short measurement of each candidate selects a few finalists, which take turns
with the shipped one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...kernels.launch import tiles
from ...ops import attention_ops
from ...testing.supervision import PREPARES, RUNS
from ..cases.case import Case
from ..cases.correctness import Expected, all_heads, expect
from ..cases.inputs import Inputs, make_inputs
from ..cases.registry import BY_NAME
from ..time.attention import REFERENCE, prepare
from ..time.failures import Failure, release
from ..time.samples import Bench, Effort, Function
from .plan import Candidate, Choice

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)
# Both halves of the samples must agree.
_FEWEST = 10
MARGIN = 0.03
# Milliseconds of each call, in temporal order, by case.
Samples = Sequence[Sequence[float]]
# Milliseconds of calls in turns, by candidate, or its failure.
Trial = Callable[[Iterable[Candidate], Effort], Mapping[str, "list[float] | Failure"]]


def expect_all(case: Case, inputs: Inputs) -> Expected:
    """The oracle's results for every head."""
    return expect(case, inputs, all_heads(case))


def trial(case: Case, bench: Bench) -> Trial:
    """A function that checks and times candidates on a case."""
    bench.announce(REFERENCE, PREPARES)
    inputs = make_inputs(case)
    expected = bench.expected(case, inputs)

    def ready(candidate: Candidate) -> Function:
        ours = BY_NAME[candidate.implementation]
        issued = partial(bench.announce, candidate.name, RUNS)
        with tiles.forced(**candidate.forced):
            work, _ = prepare(ours, case, inputs, expected, issued=issued)
        if attention_ops.uncompiled:
            # The portable kernels served the call in place of the shape.
            raise RuntimeError(attention_ops.uncompiled.pop())

        def call() -> object:
            with tiles.forced(**candidate.forced):
                return work()

        return call

    return lambda candidates, effort: replace(bench, effort=effort).samples(
        {candidate.name: partial(ready, candidate) for candidate in candidates}
    )


def score(samples: Samples) -> float:
    """Weighted medians of all cases: a causal one, with half of the pairs, counts twice."""
    weights = (2, 1) if len(samples) > 1 else (1,)
    return sum(w * statistics.median(times) for w, times in zip(weights, samples, strict=True))


def winner(shipped: Samples, others: Mapping[str, Samples]) -> tuple[str, float] | None:
    """The fastest candidate that beats the shipped one, and the saved share of time.

    Times are noisy, so the fastest of many candidates may be so by chance. It must save more than
    MARGIN in all samples and in both halves of them. None: the shipped one stays.
    """
    for name in sorted(others, key=lambda name: score(others[name])):
        pairs = zip(_with_halves(shipped), _with_halves(others[name]), strict=True)
        gains = [1 - score(its) / score(ours) for ours, its in pairs]
        if min(gains) > MARGIN:
            return name, gains[0]
    return None


def _with_halves(samples: Samples) -> tuple[Samples, Samples, Samples]:
    """All samples, their first half and their second half."""
    first = [times[: (len(times) + 1) // 2] for times in samples]
    return samples, first, [times[len(times) // 2 :] for times in samples]


@dataclass
class Outcome:
    """Outcome of a choice.

    times: milliseconds of all candidates on the first case, or the reason that there are none, in
    the order of trial. finals: samples of the finalists on all cases.
    """

    choice: Choice
    times: dict[str, float | str]
    finals: dict[str, Samples]

    def __post_init__(self) -> None:
        shipped = self.choice.shipped.name
        others = {name: x for name, x in self.finals.items() if name != shipped}
        self.winner: tuple[str, float] | None = None
        if shipped in self.finals:
            self.winner = winner(self.finals[shipped], others)
        elif others:
            # The shipped one could not be timed: it is wrong on this GPU, or does not compile.
            self.winner = min(others, key=lambda name: score(others[name])), 1.0

    def row(self) -> dict[str, Any] | None:
        """The row to store, of the winner or the shipped one; None if none could be timed."""
        if not self.finals:
            return None
        shipped = self.choice.shipped.name
        name, gain = self.winner or (shipped, 0.0)
        best = next(c for c in self.choice.candidates if c.name == name)
        row = {**self.choice.key, **best.row, "gain": round(gain, 4)}
        medians = {
            name: [_median(times) for times in samples] for name, samples in self.finals.items()
        }
        if self.choice.kind != "tiles":
            return {**row, "ms": {name: ms[0] for name, ms in medians.items()}}
        for ending, of in (("", name), ("_shipped", shipped)):
            for full, ms in zip(("ms", "ms_full"), medians.get(of, ()), strict=False):
                row[f"{full}{ending}"] = ms
        return row

    def __str__(self) -> str:
        """The outcome in a line, for readers."""
        shipped = self.choice.shipped.name
        if not self.finals:
            reasons = [x for x in self.times.values() if isinstance(x, str)]
            return f"nothing was compared: {reasons[0] if reasons else 'the time was up'}"
        if self.winner is None:
            return f"{shipped} stays: nothing else saves more than 3 %"
        name, gain = self.winner
        saved = f"{100 * gain:.1f} % less time" if shipped in self.finals else self.times[shipped]
        return f"{name} in place of {shipped}: {saved}"


def decide(
    choice: Choice,
    bench: Bench,
    left: Callable[[], float],
    why_not: Callable[[Candidate], str | None],
    seen: Callable[[Candidate, float | str], None],
) -> Outcome:
    """Time the candidates of a choice.

    left: returns the seconds left; at 0 no further candidate is tried. why_not: returns the reason
    not to launch a candidate, or None. seen: called with each candidate and its outcome.
    """
    times: dict[str, float | str] = {}
    finals: dict[str, list[list[float]]] = {}
    finalists: list[Candidate] = []
    effort = replace(bench.effort, least=max(_FEWEST, bench.effort.least))
    for case in choice.cases:
        timed = trial(case, bench)
        if not times:
            for candidate in choice.candidates:
                if times and left() <= 0:
                    break
                times[candidate.name] = why_not(candidate) or _glance(timed, candidate)
                seen(candidate, times[candidate.name])
            finalists = _finalists(choice, times)
        compared = len(finalists) > 1 or left() > 0
        for name, samples in (timed(finalists, effort) if compared else {}).items():
            if isinstance(samples, Failure):
                times[name] = samples.reason
            else:
                finals.setdefault(name, []).append(samples)
        del timed
        release()
    whole = {name: each for name, each in finals.items() if len(each) == len(choice.cases)}
    return Outcome(choice, times, dict(whole))


def _glance(timed: Trial, candidate: Candidate) -> float | str:
    """The median of a few samples, or the reason that there are none."""
    samples = timed([candidate], _GLANCE)[candidate.name]
    return samples.reason if isinstance(samples, Failure) else _median(samples)


def _median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 4)


def _finalists(choice: Choice, times: Mapping[str, float | str]) -> list[Candidate]:
    """The fastest few by short measurements, and the shipped one."""
    timed = {name: ms for name, ms in times.items() if isinstance(ms, float)}
    best = sorted(timed, key=timed.__getitem__)[:_FINALISTS]
    names = {*best, *({choice.shipped.name} & timed.keys())}
    return [c for c in choice.candidates if c.name in names]
