"""A trial: candidates on the calls of a choice, each held to the error budget before it is timed.

Every head is checked. A short measurement of each candidate picks a few finalists, which then take
turns with the shipped one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ...kernels.launch import tiles
from ...ops import attend
from ..attention import Bench, prepare, release
from ..cases import Case
from ..correctness import Expected, all_heads, expect
from ..failures import raise_if_lost, reason
from ..implementations.registry import IMPLEMENTATIONS
from ..inputs import Inputs, make_inputs
from ..measure import Effort, Function, samples_of
from .choices import Candidate, Choice
from .winner import Samples, Winner, score, winner

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)
# Halves of the samples have to agree.
_FEWEST = 10
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
        taken = samples_of(
            works,
            self._bench.timer,
            effort,
            sleep=self._bench.sleep,
            announce=lambda name, doing: self._trying(name if name in works else ""),
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


class Outcome:
    """What came of a choice.

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
