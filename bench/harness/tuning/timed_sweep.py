"""Times tiles of the kernels on a GPU and writes the fastest into a tuning table.

Candidates are compiled ahead in other processes, which also tell their registers and shared memory:
what spills or does not fit is not tried, as the tables hold no such tile. Each of the rest has to
compute the right thing before it is timed. A first short look at all picks a few, which are then
timed in alternation with the tile that is in use.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig
from ..attention import Bench, prepare, release
from ..cases import Case
from ..correctness import Expected
from ..implementations.registry import IMPLEMENTATIONS, ONE_PASS, OURS
from ..inputs import Inputs, make_inputs
from ..measure import Effort, Function, Timing, compare
from ..results.report import write_whole
from .candidates import PLACES, Compilation, Place, candidates

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)


@dataclass
class Tuner:
    """What a sweep over tiles needs.

    Args:
        bench: what to measure with.
        left: seconds left.
        compilation: compiles ahead.
        shared_bytes: shared memory that a program may take.
        survivors: candidates by place, where a static sweep has left some.
        usual: the tile in use.
        tried: every candidate with its outcome, as JSON values.
        arch: name of the GPU's architecture.
    """

    bench: Bench
    left: Callable[[], float]
    compilation: Compilation
    shared_bytes: int
    survivors: Mapping[Place, list[TileConfig]] = field(default_factory=dict)
    usual: Callable[[Place], TileConfig] = lambda p: tiles.lookup(
        p.kernel, p.element_size, p.BLOCK_D
    )
    tried: list[dict[str, Any]] = field(default_factory=list)
    arch: str = "interpreter"

    def all_tiles(self, place: Place) -> list[TileConfig]:
        """The tile in use, then the candidates."""
        usual = self.usual(place)
        others = self.survivors.get(place) or candidates(place, self.shared_bytes, self.arch)
        return [usual, *(tile for tile in others if tile != usual)]

    def sweep(self, places: tuple[Place, ...] = PLACES) -> Iterator[dict[str, Any]]:
        """The fastest tile of each place, as the row of a table, as soon as it is known."""
        for place in places:
            for tile in self.all_tiles(place):
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
            for tile in self.all_tiles(place):
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
        name = ONE_PASS if self._place.kernel == "backward_one_pass" else OURS
        ours = next(i for i in IMPLEMENTATIONS if i.name == name)
        with tiles.forced(**forced):
            work, _ = prepare(ours, self._case, self._inputs, self._expected)

        def call() -> object:
            with tiles.forced(**forced):
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
    """A table as the files in kernels/launch/tuning hold it: one row a line."""
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
    out: Path, bench: Bench, left: Callable[[], float], environment: dict[str, Any], command: str,
    survivors: Mapping[Place, list[TileConfig]] | None = None,
    rows: Sequence[dict[str, Any]] = (),
    tried: Sequence[dict[str, Any]] = (),
) -> Iterator[tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]:  # fmt: skip
    """Sweep on the current GPU; after each row the table under `out` is written anew.

    survivors: of a static sweep of this architecture, in place of all candidates.
    rows, tried: of a sweep before, which this one continues.

    Yields:
        The table's file, the rows measured so far, and every candidate tried so far.
    """
    arch = tiles.current_arch()
    name = tiles.table_for(arch)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    workers = max(1, min(10, (os.cpu_count() or 1) - 4))
    compilation = Compilation(arch, workers)
    tuner = Tuner(bench, left, compilation, shared, survivors or {}, tried=list(tried), arch=arch)
    table = {"device": properties.name, "rows": list(tiles.table(name))}
    source = provenance(environment, command)
    measured = list(rows)
    done = {Place(row["kernel"], row["element_size"], row["BLOCK_D"]) for row in measured}
    path = out / f"{name}.json"
    try:
        for row in tuner.sweep(tuple(place for place in PLACES if place not in done)):
            measured.append(row | source)
            write_whole(path, table_text(merge(table, measured)))
            yield path, measured, tuner.tried
    finally:
        compilation.close()


def effort_for(seconds: float) -> Effort:
    """How long to measure finalists in a sweep that has some seconds."""
    return replace(Effort(), target_ms=60.0 if seconds < 600 else 200.0, pause=0.1)


def deadline(seconds: float) -> Callable[[], float]:
    """Seconds left until `seconds` from now."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
