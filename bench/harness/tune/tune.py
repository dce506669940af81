"""Autotuning on this machine's GPU: `fastattn.tune`.

`main` is the process that verifies and times; others compile the candidates before. Winners are
stored at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import dispatch
from ...kernels.launch import tiles
from ...ops import attention_ops
from ...testing.supervision import WAITS, ChildProcess, Message, Tell, python, talk, variables
from ...testing.verify import verification
from ...testing.verify.verdicts import RIGHT
from ...tuned import choices
from ...tuned.environment import environment
from ...tuned.findings import KEYS
from ...tuned.store import Store
from ..time import attention
from ..time.ahead import Ahead
from ..time.measure import FINISHED, TIME_IS_UP, measure, serve
from ..time.samples import Bench, Effort, gpu_bench
from .candidates import Shape
from .plan import Candidate, Choice, Gpu, plan_of, shapes_of
from .trial import decide, expect_all

# A run of fewer seconds verifies only the most important families.
QUICK_SECONDS = 600.0
# Further seconds for a running step.
_GRACE = 30.0
VERIFICATION = "verification"


class Progress(NamedTuple):
    """Progress of a run: a step by number, from 1, and its latest event or its result."""

    number: int
    steps: int
    left: float
    step: str
    text: str
    done: bool


class Record(NamedTuple):
    """A step of the plan, its status ("done", "broken off" or "not reached") and its result."""

    step: str
    status: str
    text: str = ""


class Tuning(NamedTuple):
    """Results of a run.

    steps: records of all steps. rows: stored kinds and rows. tried: all candidates with their times
    or reasons. folder: of the findings.
    """

    steps: list[Record]
    rows: list[tuple[str, dict[str, Any]]]
    tried: list[dict[str, Any]]
    folder: Path


def tune(
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
    seconds: float = 300.0,
    only: Collection[str] | None = None,
    device: torch.device | str | int | None = None,
    folder: str | Path | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Tuning:
    """Autotune: find the fastest tiles, shapes and backends on this GPU, and store them.

    First verifies the kernels, and checks all heads of each candidate's results against the error
    budget. A candidate replaces the shipped choice if it saves more than 3 % of the time in both
    halves of the samples. Winners are stored at once, so that an interrupted run loses nothing;
    later calls and processes use them. A child process does the timing, so that a candidate that
    hangs or breaks the device ends only that process.

    Args:
        heads, kv_heads: query heads, and key/value heads; default: usual ones.
        head_dims: default: 128, 64 and 256.
        dtypes: names; default: bfloat16, then float32.
        seconds: for the whole run; the most important steps come first.
        only: kinds of choices ("tiles", "backends", "passes", "splits"), and kernels of tiles, to
            time; default: all, after verification.
        device: a GPU; default: the current one.
        folder: of results; default: `$FASTATTN_CACHE_DIR`, or the user's cache folder.
        show: called with the progress.

    Returns:
        The results of all steps.

    Raises:
        ValueError: there is no GPU, or a size cannot be served.
        ChildProcessError: the timing process cannot start.
    """
    end = time.monotonic() + seconds
    shapes = shapes_of(heads, kv_heads, head_dims, dtypes)
    if not torch.cuda.is_available():
        raise ValueError("no GPU: torch sees no CUDA device, so there is nothing to time here")
    with torch.cuda.device(torch.cuda.current_device() if device is None else device):
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = gpu_of(device)
    store = Store(environment(device), folder)
    plan = unknown_first(chosen(plan_of(shapes, gpu), only), store)
    names = [VERIFICATION] * (only is None) + [choice.name for choice in plan]
    numbers = {name: number for number, name in enumerate(names, 1)}
    settings = {
        "device": device.index, "gpu": gpu, "shapes": shapes, "quick": seconds < QUICK_SECONDS,
        "folder": None if folder is None else str(folder),
    }  # fmt: skip

    def left() -> float:
        return end - time.monotonic()

    def start(names: list[str]) -> ChildProcess:
        request = json.dumps({**settings, "names": names, "seconds": left()})
        return ChildProcess(python(__name__, request), variables())

    def heard(name: str, message: Message) -> None:
        done = "done" in message
        text = message.get("failed") or next((x["text"] for x in message.get("records", ())), "")
        if done or "note" in message:
            note = text if done else message["note"]
            show(Progress(numbers[name], len(names), left(), name, note, done))

    data: dict[str, Any] = {"jobs": {}, "broken": {}, "results": []}
    try:
        jobs = {name: (name,) for name in numbers}
        ended = measure(jobs, data, lambda: None, start, left, grace=_GRACE, heard=heard)
    finally:
        choices.forget()  # they have changed
    if ended not in (FINISHED, TIME_IS_UP):
        raise ChildProcessError(ended)
    results, ends = data["results"], data["jobs"]
    texts = {name: job.get("reason", "") for name, job in ends.items()}
    texts |= {x["step"]: x["text"] for x in results}
    records = [Record(name, ends[name]["status"], texts[name]) for name in numbers]
    rows = [(x["kind"], x["row"]) for x in results if x.get("row") is not None]
    return Tuning(records, rows, [y for x in results for y in x.get("tried", ())], store.folder)


def chosen(plan: list[Choice], only: Collection[str] | None) -> list[Choice]:
    """The choices that `only` of `tune` names; None: the plan."""
    if only is None:
        return plan
    return [choice for choice in plan if {choice.kind, choice.key.get("kernel")} & {*only}]


def unknown_first(plan: list[Choice], store: Store) -> list[Choice]:
    """The plan, with choices that lack a finding first."""
    stored = {choice.kind: store.read(choice.kind) for choice in plan}

    def known(choice: Choice) -> bool:
        return any(choice.key.items() <= row.items() for row in stored[choice.kind])

    return sorted(plan, key=known)


def not_right(store: Store) -> list[str]:
    """The kernels that verification did not find right, with their verdicts."""
    fields = (*KEYS[verification.KIND], "verdict")
    bad = (row for row in store.read(verification.KIND) if row["verdict"] != RIGHT)
    return [" ".join(str(row[name]) for name in fields) for row in bad]


def gpu_of(device: torch.device) -> Gpu:
    """Properties of the current CUDA device for a plan."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    hopper = dispatch.on_hopper(device) and not attention_ops.uncompiled
    return Gpu(tiles.current_arch(), shared, properties.multi_processor_count, hopper)


@dataclass
class Tuner:
    """Verification and choices as jobs. A record has step and text, and for a choice kind, row (of
    the winner, or None) and tried: all candidates with their times or reasons.

    store: of winners and verdicts. quick: whether to verify only the most important families. tell:
    sends a message to the parent: `note` is how far a step is.
    """

    device: torch.device
    left: Callable[[], float]
    ahead: Ahead
    store: Store
    arch: str
    quick: bool
    tell: Tell

    def compile(self, choice: Choice) -> None:
        """Start to compile the candidates; decoding with one row, which has the same kernels."""
        few = [replace(c, B=1) if c.family == "decode" else c for c in choice.cases]
        for candidate in choice.candidates:
            if candidate.implementation != "fastattn-torch":
                ours = (candidate.implementation,)
                self.ahead.submit((choice.name, candidate.name), few, ours, candidate.forced)

    def _verdict(self, backend: str, family: str, dtype: str, head_dim: int) -> str:
        key = {"backend": backend, "family": family, "dtype": dtype, "head_dim": head_dim}
        rows = [row for row in self.store.read(verification.KIND) if key.items() <= row.items()]
        return rows[-1]["verdict"] if rows else "not verified"

    def verify(self, plan: Collection[Choice], bench: Bench) -> list[attention.Record]:
        """Verify the kernels of a plan's candidates that have no verdict, in half of the time."""
        bench.announce(VERIFICATION, WAITS)  # it ends hangs itself
        pairs = dict.fromkeys(p for choice in plan for c in choice.candidates for p in c.verified)
        backends, families = (dict.fromkeys(names) for names in zip(*pairs, strict=True))
        filters: dict[str, Any] = {"backends": backends, "families": families}
        filters["dtypes"] = dict.fromkeys(choice.cases[0].dtype for choice in plan)
        filters["head_dims"] = dict.fromkeys(map(_columns, plan))
        scope = verification.scope_of(self.device, quick=self.quick, **filters)
        reserve = self.left() / 2
        how: dict[str, Any] = {"store": self.store, "left": lambda: self.left() - reserve}
        for finding in verification.run(scope, self.device, again=False, **how):
            self.tell(note=str(finding))
        return [{"step": VERIFICATION, "text": "; ".join(not_right(self.store)) or "all right"}]

    def choose(self, choice: Choice, bench: Bench) -> list[attention.Record]:
        """Time the candidates of a choice and store the winner; return its record."""
        if (why_not := self._why_wrong(choice, choice.shipped)) and choice.kind != "backends":
            return [{"step": choice.name, "text": why_not}]
        # Other kernels use their stored tiles; the candidate's tiles are forced.
        rows = {kind: self.store.read(kind) for kind in ("tiles", "splits")}
        choices.adopt(self.device, rows)
        tried: list[dict[str, Any]] = []
        times: dict[str, float] = {}

        def remember(candidate: Candidate, outcome: float | str) -> None:
            field = "ms" if isinstance(outcome, float) else "reason"
            tried.append({**choice.key, **candidate.row, field: outcome})
            if isinstance(outcome, float):
                times[candidate.name] = outcome
            note = f"{len(tried)} of {len(choice.candidates)}"
            if times:
                best = min(times, key=times.__getitem__)
                note += f"; best so far {best} {times[best]:.4g} ms"
            if choice.shipped.name in times:
                note += f", {100 * (1 - times[best] / times[choice.shipped.name]):.1f} % less"
            self.tell(note=note)

        def why_passed_over(candidate: Candidate) -> str | None:
            if candidate.name in bench.broken:
                return f"ended its process: {bench.broken[candidate.name]}"
            bench.announce(candidate.name, WAITS)
            key = (choice.name, candidate.name)
            return self._why_wrong(choice, candidate) or self.ahead.why_not(key, self.left())

        outcome = decide(choice, bench, self.left, why_passed_over, remember)
        row = outcome.row()
        if row is not None:
            self.store.put(choice.kind, row | {"arch": self.arch})
        passed = ", ".join(c.name for c in choice.candidates if c.name in bench.broken)
        text = f"{outcome}; ended their processes: {passed}" if passed else str(outcome)
        outcomes = {"kind": choice.kind, "row": row, "tried": tried}
        return [{"step": choice.name, "text": text, **outcomes}]

    def _why_wrong(self, choice: Choice, candidate: Candidate) -> str | None:
        for pair in candidate.verified:
            verdict = self._verdict(*pair, choice.cases[0].dtype, _columns(choice))
            if verdict not in (RIGHT, "not verified"):
                return f"verification of {' '.join(pair)} says: {verdict}"
        return None


def _columns(choice: Choice) -> int:
    """The class of head dims of a choice."""
    return int(choice.key.get("BLOCK_D") or choice.key["head_dim"])


def main() -> None:
    """Do steps of a plan on a GPU; the argument is the settings of `run` as JSON."""
    settings = json.loads(sys.argv[1])
    talk(lambda tell, requests: run(settings, tell, requests))


def run(settings: Mapping[str, Any], tell: Tell, requests: Iterator[Any]) -> None:
    """Do the work of the process. Remaining choices, by their names, are compiled ahead.

    settings: see `tune`.
    """
    end = time.monotonic() + settings["seconds"]
    torch.cuda.set_device(settings["device"])
    here, quick = torch.device("cuda", settings["device"]), settings["quick"]
    tell(ready=True)
    # Measures the shipped choices, not the findings of an earlier run.
    choices.adopt(here, {})
    effort = Effort(target_ms=60.0 if quick else 200.0, pause=0.1)
    bench = replace(gpu_bench("short"), effort=effort, expected=expect_all)
    gpu = Gpu(*settings["gpu"])
    plan = {x.name: x for x in plan_of((Shape(*x) for x in settings["shapes"]), gpu)}
    ahead, store = Ahead(gpu.arch), Store(environment(here), settings["folder"])
    tuner = Tuner(here, lambda: end - time.monotonic(), ahead, store, gpu.arch, quick, tell)
    for name in settings["names"]:
        if name in plan:
            tuner.compile(plan[name])
    runs = {name: partial(tuner.choose, choice) for name, choice in plan.items()}
    runs[VERIFICATION] = partial(tuner.verify, plan.values())
    try:
        serve(runs, bench, tell, requests)
    finally:
        ahead.close()
