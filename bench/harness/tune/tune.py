"""`fastattn.tune`: measure on this machine's GPU which tiles, shapes and backends are fastest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.launch import tiles
from ...ops import attend
from ...testing.verify import verification
from ...tuned import choices
from ...tuned.environment import environment
from ...tuned.store import Store
from ..time.ahead import Ahead
from ..time.samples import Effort, gpu_bench
from .choices import Choice
from .plan import Gpu, Step, Verification, shapes_of, steps
from .trial import expect_all
from .tuner import Progress, Record, Tuner, Verdicts, culprit

# A step that reports nothing for so many seconds hangs: a kernel may wait for ever.
STALL_SECONDS = 180.0
# A run of fewer seconds verifies what matters most alone.
QUICK_SECONDS = 600.0


class Tuning(NamedTuple):
    """Results of a run.

    steps: what became of each step of the plan. rows: what was stored, kinds and rows. tried: every
    candidate with its time or its reason. folder: where the findings are.
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

    Candidates are right before they are timed: the kernels are verified first, and each candidate's
    results are held to the error budget, every head. One takes the place of the shipped choice if
    it saves more than 3 % of the time in both halves of the samples. Each winner is stored at once,
    so that nothing is lost where a run is stopped; later calls, and later processes, use it.

    Args:
        model: the JSON file of a model's configuration, or its folder, whose heads and head dim are
            tuned; default the usual ones.
        heads, kv_heads: query heads, and key/value heads.
        head_dims: default 128, 64 and 256.
        dtypes: names; default bfloat16, then float32.
        seconds: for everything; the most important comes first.
        device: a GPU; default the current one.
        folder: of findings; default `$FASTATTN_CACHE_DIR`, or the user's cache folder.
        show: called with the progress.

    Returns:
        What was found, step by step.

    Raises:
        ValueError: there is no GPU, or the model or a size cannot be served.
    """
    end = time.monotonic() + seconds
    shapes = shapes_of(model, heads, kv_heads, head_dims, dtypes)
    if not torch.cuda.is_available():
        raise ValueError("no GPU: torch sees no CUDA device, so there is nothing to time here")
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())
        # What is shipped is measured, not what an earlier run found.
        choices.forget()
        choices.adopt(device, {})
        gpu = gpu_of(device)
        quick = seconds < QUICK_SECONDS
        effort = replace(Effort(), target_ms=60.0 if quick else 200.0, pause=0.1)
        bench = replace(gpu_bench("quick"), effort=effort, expected=expect_all)
        store = Store(environment(device), folder)
        verify = partial(_verify, device, store, quick)
        ahead = Ahead(gpu.arch)
        try:
            with Watchdog(show, partial(store.put, "culprits")) as watched:
                tuner = Tuner(
                    bench,
                    lambda: end - time.monotonic(),
                    ahead,
                    store,
                    gpu.arch,
                    verify,
                    watched.trying,
                    watched,
                )
                records = tuner.run(unknown_first(steps(shapes, gpu), store))
                return Tuning(records, tuner.rows, tuner.tried, store.folder)
        finally:
            ahead.close()
            choices.forget()


def unknown_first(plan: list[Step], store: Store) -> list[Step]:
    """The plan, with choices that have a finding already behind those that have none."""

    def known(step: Step) -> bool:
        return isinstance(step, Choice) and any(
            step.key.items() <= row.items() for row in stored[step.kind]
        )

    stored = {step.kind: store.read(step.kind) for step in plan if isinstance(step, Choice)}
    return sorted(plan, key=known)


def _verify(
    device: torch.device,
    store: Store,
    quick: bool,
    step: Verification,
    show: Callable[[str], None],
) -> Verdicts:
    """`fastattn.verify` for what a step names, which stores the verdicts."""
    backends, families = zip(*step.families, strict=True)
    scope = verification.scope_of(
        device,
        backends=list(dict.fromkeys(backends)),
        families=list(dict.fromkeys(families)),
        dtypes=[step.dtype],
        head_dims=[step.head_dim],
        quick=quick,
    )
    found = verification.run(
        scope, device, store=store, progress=lambda count, of, found: show(f"{count} of {of}")
    )
    return {(x.backend, x.family, x.dtype, x.head_dim): x.verdict for x in found}


def gpu_of(device: torch.device) -> Gpu:
    """Properties of the current CUDA device that a plan depends on."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    hopper = attend.on_hopper(device) and not attend.uncompiled
    return Gpu(tiles.current_arch(), shared, properties.multi_processor_count, hopper)


class Watchdog:
    """Passes progress on, and ends the process where none comes: a kernel that hangs never returns.

    What was found until then is stored, and `keep` stores which candidate it is: the next run
    passes over it.
    """

    def __init__(
        self,
        show: Callable[[Progress], None],
        keep: Callable[[dict[str, Any]], object],
        stall_seconds: float = STALL_SECONDS,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._show, self._stall, self._end = show, stall_seconds, end or _end
        self._seen, self._closed = threading.Event(), False
        self._step, self._trying, self._keep = "", ("", ""), keep

    def trying(self, choice: str, candidate: str) -> None:
        """A candidate of a choice is about to run; "": none."""
        self._trying = choice, candidate

    def __call__(self, progress: Progress) -> None:
        self._step = progress.step
        self._seen.set()
        self._show(progress)

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._seen.set()

    def _watch(self) -> None:
        while self._seen.wait(self._stall):
            if self._closed:
                return
            self._seen.clear()
        said = f"nothing happened for {self._stall:.0f} s, a kernel may hang"
        choice, candidate = self._trying
        if candidate:
            self._keep(culprit(choice, candidate, said))
            said = f"{candidate}: {said}; the next run passes over it"
        self._end(f"{self._step}: {said}")


def _end(why: str) -> None:
    os.write(2, f"fastattn: error: {why}; what was found until then is stored\n".encode())
    os._exit(1)
