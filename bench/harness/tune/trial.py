"""A trial: candidates on the calls of a choice, each held to the error budget before it is timed.

Every head is checked. A short measurement of each candidate picks a few finalists, which then take
turns with the shipped one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from ...kernels.launch import tiles
from ...ops import attend
from ..cases.case import Case
from ..cases.correctness import Expected, all_heads, expect
from ..cases.inputs import Inputs, make_inputs
from ..cases.registry import IMPLEMENTATIONS
from ..time.attention import prepare, release
from ..time.failures import raise_if_lost, reason
from ..time.samples import Bench, Effort, Function
from .choices import Candidate, Choice

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)
# Halves of the samples have to agree.
_FEWEST = 10
MARGIN = 0.03
# Milliseconds of every call, in the order of time, for each case.
Samples = Sequence[Sequence[float]]
# Candidates by name: milliseconds of a call, or why there are none.
Times = dict[str, float | str]


def expect_all(case: Case, inputs: Inputs) -> Expected:
    """The oracle's results for every head."""
    return expect(case, inputs, all_heads(case))


class Trial:
    """Candidates on one case.

    Args:
        case: the call.
        bench: the instruments; its oracle says what results have to be.
        forced: tiles and shapes in use for all candidates, which have their own beside.
        trying: called with the name of the candidate that is about to run, and with "".
    """

    def __init__(
        self, case: Case, bench: Bench, forced: dict[str, Any], trying: Callable[[str], None]
    ) -> None:
        self._case, self._bench, self._forced, self._trying = case, bench, forced, trying
        self._inputs: Inputs | None = make_inputs(case)
        self._expected: Expected | None = bench.expected(case, self._inputs)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs = self._expected = None
        release(self._case.device)

    def samples(
        self, candidates: Iterable[Candidate], effort: Effort
    ) -> dict[str, list[float] | str]:
        """Milliseconds of calls that take turns, by the candidate's name, or why it has none.

        Raises:
            DeviceLost: a candidate broke the CUDA context.
        """
        found: dict[str, list[float] | str] = {}
        works: dict[str, Function] = {}
        for candidate in candidates:
            self._trying(candidate.name)
            try:
                works[candidate.name] = self._work(candidate)
            except Exception as error:
                raise_if_lost(error, candidate.name, self._bench.timer.synchronize)
                found[candidate.name] = reason(error)
        taken = replace(self._bench, effort=effort).samples(
            works, lambda name, doing: self._trying(name if name in works else "")
        )
        self._trying("")
        for name, samples in taken.items():
            found[name] = reason(samples) if isinstance(samples, Exception) else samples
        return found

    def _work(self, candidate: Candidate) -> Function:
        """A call of the candidate; its results have passed the error budget."""
        assert self._inputs is not None and self._expected is not None
        ours = next(i for i in IMPLEMENTATIONS if i.name == candidate.implementation)

        def forced() -> AbstractContextManager[None]:
            return tiles.forced(**{**self._forced, **candidate.forced})

        with forced():
            work, _ = prepare(ours, self._case, self._inputs, self._expected)
        if attend.uncompiled:
            # The portable kernels served in place of a shape, and would for ever.
            raise RuntimeError(attend.uncompiled.pop())

        def call() -> object:
            with forced():
                return work()

        return call


class Winner(NamedTuple):
    """A candidate's name, and the share of the shipped one's time that it saves."""

    name: str
    gain: float


def score(samples: Samples) -> float:
    """Weighted medians of all cases: twice that of a causal one, which has half of the pairs."""
    weights = (2, 1) if len(samples) > 1 else (1,)
    return sum(w * statistics.median(times) for w, times in zip(weights, samples, strict=True))


def winner(shipped: Samples, others: Mapping[str, Samples]) -> Winner | None:
    """The fastest of those that beat the shipped one; None: it stays.

    Times are noisy, and of many candidates the fastest by chance is often one that is not. So it
    has to save more than MARGIN in all samples, in those of the first half of the time, and in
    those of the second.
    """
    for name in sorted(others, key=lambda name: score(others[name])):
        pairs = zip(
            (shipped, *_halves(shipped)), (others[name], *_halves(others[name])), strict=True
        )
        gains = [1 - score(its) / score(ours) for ours, its in pairs]
        if min(gains) > MARGIN:
            return Winner(name, gains[0])
    return None


def _halves(samples: Samples) -> tuple[Samples, Samples]:
    """The samples of the first half of the time, and of the second."""
    middles = [(len(times) + 1) // 2 for times in samples]
    first = [times[:middle] for times, middle in zip(samples, middles, strict=True)]
    second = [times[-middle:] for times, middle in zip(samples, middles, strict=True)]
    return first, second


class Outcome:
    """Outcome of a choice.

    times: of all candidates on the first case, in the order in which they were tried. finals: of
    the finalists on all cases.
    """

    def __init__(self, choice: Choice, times: Times, finals: dict[str, Samples]) -> None:
        self.choice, self.times, self.finals = choice, times, finals
        others = {name: x for name, x in finals.items() if name != choice.shipped.name}
        self.winner: Winner | None = None
        if choice.shipped.name in finals:
            self.winner = winner(finals[choice.shipped.name], others)
        elif others:
            # The shipped one is none that could be timed: it is wrong here, or does not compile.
            self.winner = Winner(min(others, key=lambda name: score(others[name])), 1.0)

    @property
    def best(self) -> Candidate | None:
        """The candidate to use; None: none could be timed."""
        if not self.finals:
            return None
        name = self.winner.name if self.winner else self.choice.shipped.name
        return next(c for c in self.choice.candidates if c.name == name)

    def row(self) -> dict[str, Any] | None:
        """The row to store, of the winner or of the shipped one that stays."""
        best = self.best
        if best is None:
            return None
        gain = round(self.winner.gain, 4) if self.winner else 0.0
        row = {**self.choice.key, **best.row, "gain": gain}
        medians = {
            name: [round(statistics.median(times), 4) for times in samples]
            for name, samples in self.finals.items()
        }
        if self.choice.kind != "tiles":
            return {**row, "ms": {name: ms[0] for name, ms in medians.items()}}
        for name, of in (("", best.name), ("_shipped", self.choice.shipped.name)):
            for full, ms in zip(("ms", "ms_full"), medians.get(of, ()), strict=False):
                row[f"{full}{name}"] = ms
        return row


def decide(
    choice: Choice,
    bench: Bench,
    left: Callable[[], float],
    why_not: Callable[[Candidate], str | None],
    forced: dict[str, Any],
    seen: Callable[[Candidate, float | str], None] = lambda candidate, outcome: None,
    trying: Callable[[str], None] = lambda name: None,
) -> Outcome:
    """Time the candidates of a choice.

    Args:
        left: seconds left; where there are none, no other candidate is tried.
        why_not: why a candidate is not worth a launch, or None.
        forced: as for `Trial`.
        seen: called with each candidate, and its milliseconds or the reason why it has none.
        trying: as for `Trial`.
    """
    times: Times = {}
    taken: dict[str, list[list[float]]] = {}
    for number, case in enumerate(choice.cases):
        with Trial(case, bench, forced, trying) as trial:
            if number == 0:
                for candidate in choice.candidates:
                    if times and left() <= 0:
                        break
                    times[candidate.name] = _glance(trial, candidate, why_not)
                    seen(candidate, times[candidate.name])
                finalists = _finalists(choice, times)
            effort = replace(bench.effort, least=max(_FEWEST, bench.effort.least))
            compared = len(finalists) > 1 or left() > 0
            found = trial.samples(finalists, effort) if compared else {}
        for name, samples in found.items():
            if isinstance(samples, str):
                times[name] = samples
            else:
                taken.setdefault(name, []).append(samples)
    finals: dict[str, Samples] = {
        name: each for name, each in taken.items() if len(each) == len(choice.cases)
    }
    return Outcome(choice, times, finals)


def _glance(
    trial: Trial, candidate: Candidate, why_not: Callable[[Candidate], str | None]
) -> float | str:
    if (refused := why_not(candidate)) is not None:
        return refused
    samples = trial.samples([candidate], _GLANCE)[candidate.name]
    return samples if isinstance(samples, str) else round(statistics.median(samples), 4)


def _finalists(choice: Choice, times: Times) -> list[Candidate]:
    """The fastest few at a glance, and the shipped one."""
    timed = {name: ms for name, ms in times.items() if isinstance(ms, float)}
    best = sorted(timed, key=timed.__getitem__)[:_FINALISTS]
    names = {*best, *({choice.shipped.name} & timed.keys())}
    return [c for c in choice.candidates if c.name in names]
