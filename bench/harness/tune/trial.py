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
from ...ops import attend
from ..cases.case import Case
from ..cases.correctness import Expected, all_heads, expect
from ..cases.inputs import Inputs, make_inputs
from ..cases.registry import IMPLEMENTATIONS
from ..time.attention import REFERENCE, prepare, release
from ..time.failures import raise_if_lost, reason
from ..time.samples import Announce, Bench, Effort, Function
from ..time.supervise import PREPARES, RUNS
from .choices import Candidate, Choice

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)
# Both halves of the samples must agree.
_FEWEST = 10
MARGIN = 0.03
# Milliseconds of each call, in temporal order, by case.
Samples = Sequence[Sequence[float]]


def expect_all(case: Case, inputs: Inputs) -> Expected:
    """The oracle's results for every head."""
    return expect(case, inputs, all_heads(case))


class Trial:
    """Candidates on one case.

    Args:
        case: the call.
        bench: the instruments, with the oracle.
        announce: progress callback, as in `run_case`.
    """

    def __init__(self, case: Case, bench: Bench, announce: Announce) -> None:
        self._case, self._bench, self._announce = case, bench, announce
        announce(REFERENCE, PREPARES)
        inputs = make_inputs(case)
        self._checked = (case, inputs, bench.expected(case, inputs))

    def samples(
        self, candidates: Iterable[Candidate], effort: Effort
    ) -> dict[str, list[float] | str]:
        """Milliseconds of calls in turns, by candidate, or the reason that there are none.

        Raises:
            DeviceLost: a candidate broke the CUDA context.
        """
        taken: dict[str, list[float] | str] = {}
        works: dict[str, Function] = {}
        for candidate in candidates:
            self._announce(candidate.name, PREPARES)
            try:
                works[candidate.name] = self._work(candidate)
            except Exception as error:
                raise_if_lost(error, candidate.name, self._bench.timer.synchronize)
                taken[candidate.name] = reason(error)
        timed = replace(self._bench, effort=effort).samples(works, self._announce)
        for name, samples in timed.items():
            taken[name] = reason(samples) if isinstance(samples, Exception) else samples
        return taken

    def glance(self, candidate: Candidate) -> float | str:
        """The median of a few samples, or the reason that there are none."""
        samples = self.samples([candidate], _GLANCE)[candidate.name]
        return samples if isinstance(samples, str) else round(statistics.median(samples), 4)

    def _work(self, candidate: Candidate) -> Function:
        """A call of the candidate, after the check of its results."""
        ours = next(i for i in IMPLEMENTATIONS if i.name == candidate.implementation)
        issued = partial(self._announce, candidate.name, RUNS)
        with tiles.forced(**candidate.forced):
            work, _ = prepare(ours, *self._checked, issued=issued)
        if attend.uncompiled:
            # The portable kernels served the call in place of the shape.
            raise RuntimeError(attend.uncompiled.pop())

        def call() -> object:
            with tiles.forced(**candidate.forced):
                return work()

        return call


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

    @property
    def best(self) -> Candidate | None:
        """The candidate to use, or None if none could be timed."""
        if not self.finals:
            return None
        name = self.winner[0] if self.winner else self.choice.shipped.name
        return next(c for c in self.choice.candidates if c.name == name)

    def row(self) -> dict[str, Any] | None:
        """The row to store, of the winner or the shipped one."""
        best = self.best
        if best is None:
            return None
        gain = round(self.winner[1], 4) if self.winner else 0.0
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
    seen: Callable[[Candidate, float | str], None],
    announce: Announce,
) -> Outcome:
    """Time the candidates of a choice.

    Args:
        left: returns the seconds left; at 0 no further candidate is tried.
        why_not: returns the reason not to launch a candidate, or None.
        seen: called with each candidate and its milliseconds or the reason that there are none.
        announce: as for `Trial`.
    """
    times: dict[str, float | str] = {}
    finals: dict[str, list[list[float]]] = {}
    finalists: list[Candidate] = []
    for number, case in enumerate(choice.cases):
        trial = Trial(case, bench, announce)
        if number == 0:
            for candidate in choice.candidates:
                if times and left() <= 0:
                    break
                times[candidate.name] = why_not(candidate) or trial.glance(candidate)
                seen(candidate, times[candidate.name])
            finalists = _finalists(choice, times)
        effort = replace(bench.effort, least=max(_FEWEST, bench.effort.least))
        compared = len(finalists) > 1 or left() > 0
        for name, samples in (trial.samples(finalists, effort) if compared else {}).items():
            if isinstance(samples, str):
                times[name] = samples
            else:
                finals.setdefault(name, []).append(samples)
        del trial
        release(case.device)
    whole = {name: each for name, each in finals.items() if len(each) == len(choice.cases)}
    return Outcome(choice, times, dict(whole))


def _finalists(choice: Choice, times: Mapping[str, float | str]) -> list[Candidate]:
    """The fastest few by short measurements, and the shipped one."""
    timed = {name: ms for name, ms in times.items() if isinstance(ms, float)}
    best = sorted(timed, key=timed.__getitem__)[:_FINALISTS]
    names = {*best, *({choice.shipped.name} & timed.keys())}
    return [c for c in choice.candidates if c.name in names]
