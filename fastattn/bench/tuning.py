"""Times tiles of the kernels on a GPU and writes the fastest into a tuning table.

Candidates are compiled ahead in other processes, which also tell their registers and shared memory:
what spills or does not fit is not tried, as the tables hold no such tile. Each of the rest has to
compute the right thing before it is timed. A first short look at all picks a few, which are then
timed in alternation with the tile that is in use.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .. import dispatch, functional
from ..kernels import config
from ..kernels.config import TileConfig
from ..testing.compile_pool import CompilePool
from ..testing.cross_compile import TARGETS, CompiledFacts
from .attention import Bench, prepare, release
from .cases import Case
from .correctness import Expected
from .implementations import IMPLEMENTATIONS, OURS
from .inputs import Inputs, make_inputs
from .measure import Effort, Function, Timing, compare
from .report import write_whole

_FINALISTS = 4
_MOST = 24  # candidates of a row
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)
_FAMILIES = {
    "forward": ("attention_forward_kernel",),
    "backward_dq": ("attention_backward_dq_kernel",),
    "backward_dkv": ("attention_backward_dkv_kernel",),
}


@dataclass(frozen=True)
class Place:
    """A row of a tuning table: kernel, bytes of an element, padded head dim."""

    kernel: str
    element_size: int
    BLOCK_D: int

    def case(self, causal: bool) -> Case:
        """What its tiles are timed on: 16384 tokens in sequences of 4096, hidden size 2048."""
        H = 2048 // self.BLOCK_D
        direction = "forward" if self.kernel == "forward" else "backward"
        dtype = "bfloat16" if self.element_size == 2 else "float32"
        return Case(direction, direction, 4, H, H, 4096, 4096, self.BLOCK_D, causal, dtype=dtype)  # type: ignore[arg-type]


PLACES: tuple[Place, ...] = tuple(
    Place(kernel, size, D)
    for size, D in ((2, 128), (2, 64), (2, 256), (4, 64), (4, 128), (4, 256))
    for kernel in ("forward", "backward_dkv", "backward_dq")
)


def candidates(place: Place, shared_bytes: int) -> list[TileConfig]:
    """Tiles that may suit a row, those with the larger tiles first.

    Left out without a compilation: tiles whose accumulators alone would fill the registers, and
    those whose operands cannot fit `shared_bytes`.
    """
    rows = (64, 128) if place.kernel == "forward" else (32, 64, 128)
    grid = itertools.product(rows, (32, 64, 128), (4, 8), (1, 2, 3))
    tiles = [TileConfig(*numbers) for numbers in grid]
    fitting = [t for t in tiles if _plausible(place, t, shared_bytes)]
    fitting.sort(key=lambda t: (-t.BLOCK_M * t.BLOCK_N, abs(t.num_stages - 2)))
    return fitting[:_MOST]


def _plausible(place: Place, tile: TileConfig, shared_bytes: int) -> bool:
    D, threads = place.BLOCK_D, 32 * tile.num_warps
    backward = place.kernel != "forward"
    by_keys = place.kernel == "backward_dkv"
    held, streamed = (tile.BLOCK_N, tile.BLOCK_M) if by_keys else (tile.BLOCK_M, tile.BLOCK_N)
    accumulators = held * D * (2 if by_keys else 1) + tile.BLOCK_M * tile.BLOCK_N * (1 + backward)
    operands = held * D * (2 if backward else 1) + tile.num_stages * 2 * streamed * D
    return accumulators / threads <= 224 and operands * place.element_size <= shared_bytes


def launch_once(kernel: str, element_size: int, D: int, causal: bool, tile: dict[str, int]) -> None:
    """Launch what uses a kernel, with a tile, for the stand-in driver of a compiling process."""
    dtype = torch.bfloat16 if element_size == 2 else torch.float32
    q, k, v = (torch.zeros(1, 256, 1, D, dtype=dtype).transpose(1, 2) for _ in range(3))
    leaves = [x.requires_grad_(kernel != "forward") for x in (q, k, v)]
    with (
        config.forced(**{kernel: TileConfig(**tile)}),
        mock.patch.object(dispatch, "why_not_triton", lambda *tensors: None),
    ):
        o = functional.attention(*leaves, causal=causal, backend="triton")
        if kernel != "forward":
            torch.autograd.grad(o, leaves, torch.zeros_like(o))


class Compilation:
    """Compiles candidates ahead, in other processes, where their results land in Triton's cache.

    Args:
        arch: name of the GPU's architecture; others than `cross_compile.TARGETS` are not compiled
            ahead.
        workers: processes.
    """

    def __init__(self, arch: str, workers: int) -> None:
        self._arch = arch
        self._pool = CompilePool(workers) if arch in TARGETS else None
        self._futures: dict[tuple[Place, TileConfig, bool], Future[list[CompiledFacts]]] = {}

    def submit(self, place: Place, tile: TileConfig) -> None:
        """Start with a candidate, causal and not."""
        for causal in (True, False) if self._pool else ():
            assert self._pool is not None
            self._futures[place, tile, causal] = self._pool.submit(
                "fastattn.bench.tuning:launch_once",
                self._arch,
                kernel=place.kernel,
                element_size=place.element_size,
                D=place.BLOCK_D,
                causal=causal,
                tile=asdict(tile),
            )

    def why_not(self, place: Place, tile: TileConfig, seconds: float) -> str | None:
        """Why a candidate is not worth a launch, waiting at most `seconds`; None if it is."""
        for causal in (True, False):
            future = self._futures.pop((place, tile, causal), None)
            if future is None:
                continue
            try:
                facts = future.result(timeout=max(0.0, seconds))
            except TimeoutError:
                return "was not compiled in time"
            except BrokenProcessPool:
                continue  # some candidate has ended the compiler: what is left compiles at launch
            except Exception as error:
                return f"does not compile: {' '.join(str(error).split())[:200]}"
            for fact in facts:
                if fact.name not in _FAMILIES[place.kernel]:
                    continue
                if fact.spills:
                    return f"spills {fact.spill_store_bytes} bytes a thread"
                if not fact.fits_shared_memory:
                    return f"needs {fact.shared_bytes} bytes of shared memory"
        return None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


@dataclass
class Tuner:
    """What a sweep over tiles needs.

    Args:
        bench: what to measure with.
        left: seconds left.
        compilation: compiles ahead.
        shared_bytes: shared memory that a program may take.
        usual: the tile in use.
        tried: every candidate with its outcome, as JSON values.
    """

    bench: Bench
    left: Callable[[], float]
    compilation: Compilation
    shared_bytes: int
    usual: Callable[[Place], TileConfig] = lambda p: config.lookup(
        p.kernel, p.element_size, p.BLOCK_D
    )
    tried: list[dict[str, Any]] = field(default_factory=list)

    def tiles(self, place: Place) -> list[TileConfig]:
        """The tile in use, then the candidates."""
        usual = self.usual(place)
        return [usual, *(t for t in candidates(place, self.shared_bytes) if t != usual)]

    def sweep(self, places: tuple[Place, ...] = PLACES) -> Iterator[dict[str, Any]]:
        """The fastest tile of each place, as the row of a table, as soon as it is known."""
        for place in places:
            for tile in self.tiles(place):
                self.compilation.submit(place, tile)
        for place in places:
            if self.left() <= 0:
                return
            row = self._tune(place)
            release(place.case(True).device)
            if row is not None:
                yield row

    def _tune(self, place: Place) -> dict[str, Any] | None:
        glances: dict[TileConfig, float] = {}
        with _Trial(place, place.case(causal=True), self.bench) as trial:
            for tile in self.tiles(place):
                if self.left() <= 0:
                    break
                why_not = self.compilation.why_not(place, tile, self.left())
                outcome: float | str
                outcome = trial.time([tile], _GLANCE)[tile] if why_not is None else why_not
                self._note(place, tile, outcome)
                if isinstance(outcome, float):
                    glances[tile] = outcome
            finalists = sorted(glances, key=glances.__getitem__)[:_FINALISTS]
            usual = self.usual(place)
            if usual in glances and usual not in finalists:
                finalists.append(usual)
            causal = trial.time(finalists, self.bench.effort)
        with _Trial(place, place.case(causal=False), self.bench) as trial:
            full = trial.time(finalists, self.bench.effort)
        # Half of the pairs, half of the time: both masks get the same weight.
        scores = {
            tile: 2 * a + b
            for tile in finalists
            if isinstance(a := causal[tile], float) and isinstance(b := full[tile], float)
        }
        if not scores:
            return None
        best = min(scores, key=scores.__getitem__)
        times = {"ms": causal[best], "ms_full": full[best]}
        return {**asdict(place), **asdict(best), "source": "measured", **times}

    def _note(self, place: Place, tile: TileConfig, outcome: float | str) -> None:
        key = "ms" if isinstance(outcome, float) else "reason"
        self.tried.append({**asdict(place), **asdict(tile), key: outcome})


class _Trial:
    """Times tiles of one kernel on one case; the other kernels keep theirs."""

    def __init__(self, place: Place, case: Case, bench: Bench) -> None:
        self._place, self._case, self._bench = place, case, bench
        self._inputs: Inputs | None = None
        self._expected: Expected | None = None

    def __enter__(self) -> _Trial:
        self._inputs = make_inputs(self._case)
        self._expected = self._bench.expected(self._case, self._inputs)
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs = self._expected = None

    def time(self, tiles: list[TileConfig], effort: Effort) -> dict[TileConfig, float | str]:
        """Median milliseconds of each tile, or why there are none."""
        found: dict[TileConfig, float | str] = {}
        works: dict[str, Function] = {}
        for tile in tiles:
            try:
                works[str(tile)] = self._work(tile)
            except Exception as error:
                found[tile] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        timings = compare(works, self._bench.timer, effort, sleep=self._bench.sleep)
        for tile in tiles:
            timing = timings.get(str(tile))
            if isinstance(timing, Timing):
                found[tile] = round(timing.median, 4)
            elif timing is not None:
                found[tile] = f"{type(timing).__name__}: {timing}"[:200]
        return found

    def _work(self, tile: TileConfig) -> Function:
        """A call with the tile forced, whose results have been checked."""
        assert self._inputs is not None and self._expected is not None
        forced = {self._place.kernel: tile}
        ours = next(i for i in IMPLEMENTATIONS if i.name == OURS)
        with config.forced(**forced):
            work, _ = prepare(ours, self._case, self._inputs, self._expected)

        def call() -> object:
            with config.forced(**forced):
                return work()

        return call


def merge(table: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A table with rows put in the place of those for the same kernel, element size and D."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["kernel"], row["element_size"], row["BLOCK_D"]

    fresh = {place(row): row for row in rows}
    kept = [fresh.pop(place(row), row) for row in table["rows"]]
    return {**table, "rows": [*kept, *fresh.values()]}


def table_text(table: dict[str, Any]) -> str:
    """A table as the files in kernels/tuning hold it: one row a line."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    rest = {key: value for key, value in table.items() if key != "rows"}
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in rest.items())
    return f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'


def provenance(environment: dict[str, Any], command: str) -> dict[str, str]:
    """What a measured row says of its measurement."""
    versions = environment.get("versions", {})
    return {
        "gpu": str((environment.get("gpu") or {}).get("name")),
        "torch": versions.get("torch", ""),
        "triton": versions.get("triton", ""),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
    }


def tune(
    out: Path, bench: Bench, left: Callable[[], float], environment: dict[str, Any], command: str
) -> Iterator[tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Sweep on the current GPU; after each row the table under `out` is written anew.

    Yields:
        The table's file, the rows measured so far, and every candidate tried so far.
    """
    arch = config.current_arch()
    name = config.table_for(arch)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    workers = max(1, min(10, (os.cpu_count() or 1) - 4))
    compilation = Compilation(arch, workers)
    tuner = Tuner(bench, left, compilation, shared)
    table = {"device": properties.name, "rows": list(config.table(name))}
    source = provenance(environment, command)
    rows: list[dict[str, Any]] = []
    path = out / f"{name}.json"
    try:
        for row in tuner.sweep():
            rows.append(row | source)
            write_whole(path, table_text(merge(table, rows)))
            yield path, rows, tuner.tried
    finally:
        compilation.close()


def effort_for(seconds: float) -> Effort:
    """How long to measure finalists in a sweep that has some seconds."""
    return replace(Effort(), target_ms=60.0 if seconds < 600 else 200.0, pause=0.1)


def deadline(seconds: float) -> Callable[[], float]:
    """Seconds left until `seconds` from now."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
