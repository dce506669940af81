"""The steps of a plan as jobs of a process; winners are stored at once.

Worker processes compile the candidates first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...testing.verify import verification
from ...tuned import choices
from ...tuned.environment import environment
from ...tuned.store import Store
from ..time.ahead import Ahead
from ..time.attention import Record
from ..time.jobs import Job
from ..time.measure import serve
from ..time.samples import Announce, Bench, Effort, gpu_bench
from ..time.supervise import WAITS, Tell, talk
from .candidates import Shape
from .choices import Candidate, Choice
from .plan import Gpu, Step, Verification, steps
from .trial import Outcome, decide, expect_all

RIGHT = "right"
# By backend, family, dtype and head dim.
Verdicts = dict[tuple[str, str, str, int], str]


@dataclass
class Tuner:
    """The jobs of a plan. A record has step and text, and for a choice kind, row (of the winner, or
    None) and tried: all candidates with their times or reasons.

    Args:
        device: to tune.
        left: seconds left.
        ahead: compiles the candidates.
        store: of winners and verdicts.
        arch: of the GPU, for the rows.
        verify: verifies families of backends for a dtype and head dim, stores the verdicts, and
            reports progress.
        tell: sends a message to the parent: `said` is how far a step is.
    """

    device: torch.device
    left: Callable[[], float]
    ahead: Ahead
    store: Store
    arch: str
    verify: Callable[[Verification, Callable[[str], None]], object]
    tell: Tell

    def job(self, step: Step) -> Job:
        """A step as a job."""
        if isinstance(step, Choice):
            return Job(step.name, partial(self._choose, step))
        return Job(step.name, partial(self._verify, step))

    def compile(self, choice: Choice) -> None:
        """Start to compile the candidates; decoding with one row, which has the same kernels."""
        few = [replace(c, B=1) if c.family == "decode" else c for c in choice.cases]
        for candidate in choice.candidates:
            if candidate.implementation != "fastattn-torch":
                ours = (candidate.implementation,)
                self.ahead.submit((choice.name, candidate.name), few, ours, candidate.forced)

    def _verdicts(self) -> Verdicts:
        return {
            (row["backend"], row["family"], row["dtype"], row["head_dim"]): row["verdict"]
            for row in self.store.read("verification")
        }

    def _verify(
        self, step: Verification, bench: Bench, broken: Mapping[str, str], announce: Announce
    ) -> list[Record]:
        announce("the verification", WAITS)  # it ends hangs itself
        keys = {pair: (*pair, step.dtype, step.head_dim) for pair in step.families}
        stored = self._verdicts()
        unknown = tuple(pair for pair, key in keys.items() if key not in stored)
        if unknown:
            self.verify(step._replace(families=unknown), lambda note: self.tell(note=note))
            stored = self._verdicts()
        verdicts = {pair: stored.get(key, "not verified") for pair, key in keys.items()}
        bad = [f"{' '.join(pair)}: {x}" for pair, x in verdicts.items() if x != RIGHT]
        return [{"step": step.name, "text": "; ".join(bad) or "all right"}]

    def _choose(
        self, choice: Choice, bench: Bench, broken: Mapping[str, str], announce: Announce
    ) -> list[Record]:
        wrong = partial(_why_wrong, choice, self._verdicts())
        if (why_not := wrong(choice.shipped)) and choice.kind != "backends":
            return [{"step": choice.name, "text": why_not}]
        # Other kernels use their stored tiles; the candidate's tiles are forced.
        rows = {kind: self.store.read(kind) for kind in ("tiles", "splits")}
        choices.adopt(self.device, rows)
        times: dict[str, float] = {}
        tried: list[dict[str, Any]] = []

        def remember(candidate: Candidate, outcome: float | str) -> None:
            field = "ms" if isinstance(outcome, float) else "reason"
            tried.append({**choice.key, **candidate.row, field: outcome})
            if isinstance(outcome, float):
                times[candidate.name] = outcome
            best = _best_so_far(choice, times)
            self.tell(note=f"{len(tried)} of {len(choice.candidates)}{best}")

        def why_passed_over(candidate: Candidate) -> str | None:
            if candidate.name in broken:
                return f"ended its process: {broken[candidate.name]}"
            announce(candidate.name, WAITS)
            key = (choice.name, candidate.name)
            return wrong(candidate) or self.ahead.why_not(key, self.left())

        outcome = decide(choice, bench, self.left, why_passed_over, remember, announce)
        row = outcome.row()
        if row is not None:
            self.store.put(choice.kind, row | {"arch": self.arch})
        text = _told(outcome)
        passed = [c.name for c in choice.candidates if c.name in broken]
        text += f"; ended their processes: {', '.join(passed)}" if passed else ""
        about = {"step": choice.name, "text": text}
        return [{**about, "kind": choice.kind, "row": row, "tried": tried}]


def _why_wrong(choice: Choice, verdicts: Verdicts, candidate: Candidate) -> str | None:
    dtype, _ = choice.size
    head_dim = choice.key.get("BLOCK_D") or choice.key["head_dim"]
    for backend, family in candidate.verified:
        verdict = verdicts.get((backend, family, dtype, head_dim), RIGHT)
        if verdict != RIGHT:
            return f"verification of {backend} {family} says: {verdict}"
    return None


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


def main() -> None:
    """Do steps of a plan on a GPU; the argument is the settings of `run` as JSON."""
    settings = json.loads(sys.argv[1])
    talk(lambda tell, requests: run(tell=tell, requests=requests, **settings))


def run(
    device: int,
    gpu: list[Any],
    shapes: list[list[Any]],
    names: list[str],
    seconds: float,
    folder: str | None,
    quick: bool,
    tell: Tell,
    requests: Iterator[Any],
) -> int:
    """The work of the process; its exit code.

    gpu, shapes: fields for the plan. names: remaining steps, which are compiled ahead. seconds: for
    all of them. folder: of findings. quick: for verification.
    """
    end = time.monotonic() + seconds
    torch.cuda.set_device(device)
    here = torch.device("cuda", device)
    tell(ready=True)
    # Measures the shipped choices, not the findings of an earlier run.
    choices.adopt(here, {})
    effort = replace(Effort(), target_ms=60.0 if quick else 200.0, pause=0.1)
    bench = replace(gpu_bench("quick"), effort=effort, expected=expect_all)
    store = Store(environment(here), folder)
    plan = {step.name: step for step in steps((Shape(*x) for x in shapes), Gpu(*gpu))}
    arch = Gpu(*gpu).arch
    ahead = Ahead(arch)
    verify = partial(_verify, here, store, quick)
    tuner = Tuner(here, lambda: end - time.monotonic(), ahead, store, arch, verify, tell)
    for step in (plan[name] for name in names):
        if isinstance(step, Choice):
            tuner.compile(step)
    try:
        return serve(map(tuner.job, plan.values()), bench, tell, requests)
    finally:
        ahead.close()


def _verify(
    device: torch.device,
    store: Store,
    quick: bool,
    step: Verification,
    show: Callable[[str], None],
) -> None:
    """`fastattn.verify` for the families of a step; stores the verdicts."""
    backends, families = zip(*step.families, strict=True)
    scope = verification.scope_of(
        device,
        backends=list(dict.fromkeys(backends)),
        families=list(dict.fromkeys(families)),
        dtypes=[step.dtype],
        head_dims=[step.head_dim],
        quick=quick,
    )

    def progress(count: int, of: int, result: object) -> None:
        show(f"{count} of {of}")

    for _ in verification.run(scope, device, store=store, progress=progress):
        pass
