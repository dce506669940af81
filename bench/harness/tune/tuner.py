"""A tuning run: the steps of a plan, one after the other, within a time; winners are kept at once.

Worker processes compile the candidates first. Those that spill in a loop or exceed shared memory
are not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...tuned.store import Store
from ..time.ahead import Ahead
from ..time.failures import DeviceLost
from ..time.samples import Bench
from .choices import Candidate, Choice
from .plan import Step, Verification
from .trial import Outcome, decide

DONE, NOT_REACHED, SKIPPED, LOST = "done", "not reached", "skipped", "lost the device"
RIGHT = "right"
# By backend, family, dtype and head dim.
Verdicts = dict[tuple[str, str, str, int], str]


class Progress(NamedTuple):
    """Where a run is.

    number: of the step, from 1. text: what was seen last, or what the step came to once it is done.
    """

    number: int
    steps: int
    left: float
    step: str
    text: str
    done: bool


class Record(NamedTuple):
    """A step of the plan, its status (DONE or another of the names above), and what it came to."""

    step: str
    status: str
    text: str = ""


@dataclass
class Tuner:
    """A run over the steps of a plan.

    Args:
        bench: what to measure with.
        left: seconds left.
        ahead: compiles the candidates.
        store: findings: each winner is put there, and verdicts and culprits of earlier runs read.
        arch: of the GPU, for the rows.
        verify: verifies families of backends for a dtype and head dim, and says how far it is.
        trying: called with the names of a choice and of the candidate that is about to run, or "".
        show: called with the progress.
    """

    bench: Bench
    left: Callable[[], float]
    ahead: Ahead
    store: Store
    arch: str
    verify: Callable[[Verification, Callable[[str], None]], Verdicts]
    trying: Callable[[str, str], None] = lambda choice, candidate: None
    show: Callable[[Progress], None] = lambda progress: None
    tried: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Tiles and shapes of plain calls that won, by dtype and head dim.
        self._best: dict[tuple[str, int], dict[str, Any]] = {}
        self._verified: Verdicts = {
            (row["backend"], row["family"], row["dtype"], row["head_dim"]): row["verdict"]
            for row in self.store.read("verification")
        }
        self._culprits = {
            (row["choice"], row["candidate"]): f"{row['reason']} ({row['date']})"
            for row in self.store.read("culprits")
        }

    def run(self, plan: Sequence[Step]) -> list[Record]:
        """Take the steps in their order, and record the outcome of each."""
        for choice in plan if self.left() > 0 else ():
            if isinstance(choice, Choice):
                self._compile(choice)
        records: list[Record] = []
        for number, step in enumerate(plan, start=1):
            if self.left() <= 0 or (records and records[-1].status in (LOST, NOT_REACHED)):
                records.append(Record(step.name, NOT_REACHED))
                continue

            def show(text: str, done: bool = False, number: int = number, of: Step = step) -> None:
                self.show(Progress(number, len(plan), self.left(), of.name, text, done))

            show("")
            if isinstance(step, Choice):
                records.append(self._choose(step, show))
            else:
                records.append(Record(step.name, DONE, self._verify(step, show)))
            show(records[-1].text, done=True)
        return records

    def _compile(self, choice: Choice) -> None:
        """Start to compile the candidates; in decoding for few rows, which split keys alike."""
        few = [replace(c, B=1) if c.family == "decode" else c for c in choice.cases]
        for candidate in choice.candidates:
            if candidate.implementation != "fastattn-torch":
                ours = (candidate.implementation,)
                self.ahead.submit((choice.name, candidate.name), few, ours, candidate.forced)

    def _verify(self, step: Verification, show: Callable[[str], None]) -> str:
        keys = {pair: (*pair, step.dtype, step.head_dim) for pair in step.families}
        unknown = tuple(pair for pair, key in keys.items() if key not in self._verified)
        if unknown:
            self._verified.update(self.verify(step._replace(families=unknown), show))
        verdicts = {pair: self._verified.get(key, "not verified") for pair, key in keys.items()}
        bad = [f"{' '.join(pair)}: {said}" for pair, said in verdicts.items() if said != RIGHT]
        return "; ".join(bad) or "all right"

    def _choose(self, choice: Choice, show: Callable[[str], None]) -> Record:
        if (why_not := self._why_wrong(choice, choice.shipped)) and choice.kind != "backends":
            return Record(choice.name, SKIPPED, why_not)
        plain = choice.key.get("calls", "plain") == "plain"
        times: dict[str, float] = {}
        count = 0

        def remember(candidate: Candidate, outcome: float | str) -> None:
            nonlocal count
            count += 1
            said = "ms" if isinstance(outcome, float) else "reason"
            self.tried.append({**choice.key, **candidate.row, said: outcome})
            if isinstance(outcome, float):
                times[candidate.name] = outcome
            show(f"{count} of {len(choice.candidates)}{_best_so_far(choice, times)}")

        passed = [c.name for c in choice.candidates if self._why_passed_over(choice, c)]
        also = f"; passed over, for it ended an earlier run: {', '.join(passed)}" if passed else ""
        try:
            outcome = decide(
                choice,
                self.bench,
                self.left,
                lambda candidate: (
                    self._why_passed_over(choice, candidate)
                    or self._why_wrong(choice, candidate)
                    or self.ahead.why_not((choice.name, candidate.name), self.left(), choice.kernel)
                ),
                self._best.get(choice.size, {}) if plain else {},
                remember,
                lambda name: self.trying(choice.name, name),
            )
        except DeviceLost as lost:
            if lost.implementation in [candidate.name for candidate in choice.candidates]:
                self.store.put("culprits", culprit(choice.name, lost.implementation, lost.reason))
            return Record(choice.name, LOST, str(lost))
        row = outcome.row()
        if row is not None:
            self.rows.append((choice.kind, row))
            self.store.put(choice.kind, row | {"arch": self.arch})
        if plain and outcome.best is not None:
            self._best.setdefault(choice.size, {}).update(outcome.best.forced)
        return Record(choice.name, DONE, _told(outcome) + also)

    def _why_passed_over(self, choice: Choice, candidate: Candidate) -> str | None:
        why = self._culprits.get((choice.name, candidate.name))
        return None if why is None else f"ended an earlier run: {why}"

    def _why_wrong(self, choice: Choice, candidate: Candidate) -> str | None:
        dtype, _ = choice.size
        head_dim = choice.key.get("BLOCK_D") or choice.key["head_dim"]
        for backend, family in candidate.verified:
            verdict = self._verified.get((backend, family, dtype, head_dim), RIGHT)
            if verdict != RIGHT:
                return f"verification of {backend} {family} says: {verdict}"
        return None


def culprit(choice: str, candidate: str, reason: str) -> dict[str, Any]:
    """The row about a candidate that ends a run."""
    return {"choice": choice, "candidate": candidate, "reason": reason}


def _best_so_far(choice: Choice, times: Mapping[str, float]) -> str:
    if not times:
        return ""
    best = min(times, key=times.__getitem__)
    shipped = times.get(choice.shipped.name)
    gained = "" if shipped is None else f", {1 - times[best] / shipped:.1%} less".replace("%", " %")
    return f"; best so far {best} {times[best]:.4g} ms{gained}"


def _told(outcome: Outcome) -> str:
    shipped = outcome.choice.shipped.name
    if outcome.best is None:
        reasons = [x for x in outcome.times.values() if isinstance(x, str)]
        return f"nothing was compared: {reasons[0] if reasons else 'the time was up'}"
    if outcome.winner is None:
        return f"{shipped} stays: nothing else saves more than 3 %"
    name, gain = outcome.winner
    saved = f"{100 * gain:.1f} % less time" if shipped in outcome.finals else outcome.times[shipped]
    return f"{name} in place of {shipped}: {saved}"
