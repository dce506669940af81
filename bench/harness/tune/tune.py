"""`fastattn.tune`: measure on this machine's GPU which tiles, shapes and backends are fastest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import dispatch
from ...kernels.launch import tiles
from ...ops import attend
from ...tuned import choices
from ...tuned.environment import environment
from ...tuned.store import Store
from ..time.jobs import Job
from ..time.measure import FINISHED, TIME_IS_UP, measure
from ..time.supervise import ChildProcess, Message, python, variables
from .choices import Choice
from .plan import Gpu, Step, shapes_of, steps

# A run of fewer seconds verifies only the most important families.
QUICK_SECONDS = 600.0
# Further seconds for a running step.
_GRACE = 30.0


class Progress(NamedTuple):
    """Progress of a run.

    number: of the step, from 1. text: the latest event, or the result of a finished step.
    """

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
    model: str | Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
    seconds: float = 300.0,
    device: torch.device | str | int | None = None,
    folder: str | Path | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Tuning:
    """Measure on this machine's GPU which tiles, shapes and backends are fastest, and store it.

    First verifies the kernels, and checks all heads of each candidate's results against the error
    budget. A candidate replaces the shipped choice if it saves more than 3 % of the time in both
    halves of the samples. Winners are stored at once, so that an interrupted run loses nothing;
    later calls and processes use them. A child process does the timing, so that a candidate that
    hangs or breaks the device ends only that process.

    Args:
        model: a model's configuration as a JSON file, or its folder, for heads and head dim;
            default: usual ones.
        heads, kv_heads: query heads, and key/value heads.
        head_dims: default: 128, 64 and 256.
        dtypes: names; default: bfloat16, then float32.
        seconds: for the whole run; the most important steps come first.
        device: a GPU; default: the current one.
        folder: of findings; default: `$FASTATTN_CACHE_DIR`, or the user's cache folder.
        show: called with the progress.

    Returns:
        The results of all steps.

    Raises:
        ValueError: there is no GPU, or the model or a size cannot be served.
        ChildProcessError: the timing process cannot start.
    """
    end = time.monotonic() + seconds
    shapes = shapes_of(model, heads, kv_heads, head_dims, dtypes)
    if not torch.cuda.is_available():
        raise ValueError("no GPU: torch sees no CUDA device, so there is nothing to time here")
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = gpu_of(device)
    store = Store(environment(device), folder)
    plan = unknown_first(steps(shapes, gpu), store)
    numbers = {step.name: number for number, step in enumerate(plan, 1)}
    settings = {
        "device": device.index, "gpu": gpu, "shapes": shapes, "quick": seconds < QUICK_SECONDS,
        "folder": None if folder is None else str(folder),
    }  # fmt: skip

    def left() -> float:
        return end - time.monotonic()

    def start(names: list[str]) -> ChildProcess:
        request = json.dumps({**settings, "names": names, "seconds": left()})
        return ChildProcess(python("fastattn.bench.tune.tuner", request), variables())

    def heard(name: str, message: Message) -> None:
        done = "done" in message
        text = message.get("failed") or next((x["text"] for x in message.get("records", ())), "")
        if done or "note" in message:
            note = text if done else message["note"]
            show(Progress(numbers[name], len(plan), left(), name, note, done))

    data: dict[str, Any] = {"jobs": {}, "broken": {}, "results": []}
    try:
        jobs = [Job(step.name, run=lambda *_: []) for step in plan]
        ended = measure(jobs, data, lambda: None, start, left, grace=_GRACE, heard=heard)
    finally:
        choices.forget()  # they have changed
    if ended not in (FINISHED, TIME_IS_UP):
        raise ChildProcessError(ended)
    texts = {record["step"]: record["text"] for record in data["results"]}
    records = [
        Record(name, job["status"], texts.get(name, job.get("reason", "")))
        for name, job in ((name, data["jobs"][name]) for name in numbers)
    ]
    chosen = [x for x in data["results"] if "row" in x]
    rows = [(x["kind"], x["row"]) for x in chosen if x["row"] is not None]
    return Tuning(records, rows, [y for x in chosen for y in x["tried"]], store.folder)


def unknown_first(plan: list[Step], store: Store) -> list[Step]:
    """The plan, with choices that lack a finding first."""

    def verified(step: Step) -> bool:
        return isinstance(step, Choice) and any(
            step.key.items() <= row.items() for row in stored[step.kind]
        )

    stored = {step.kind: store.read(step.kind) for step in plan if isinstance(step, Choice)}
    return sorted(plan, key=verified)


def gpu_of(device: torch.device) -> Gpu:
    """Properties of the current CUDA device for a plan."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    hopper = dispatch.on_hopper(device) and not attend.uncompiled
    return Gpu(tiles.current_arch(), shared, properties.multi_processor_count, hopper)
