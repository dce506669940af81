"""The autotuner: times candidate tiles on a GPU and writes the fastest into a tuning table.

Worker processes compile the candidates first. Those that spill or exceed shared memory are not
timed, since the tables hold no such tile. The rest must pass the error budget before they are
timed. A short measurement of all picks a few finalists, which then alternate with the tile in use.
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
from .candidates import ENTRIES, Compilation, TableEntry, candidates

_FINALISTS = 4
_GLANCE = Effort(warm_up=1, target_ms=8, least=3, most=6, pause=0)


@dataclass
class Tuner:
    """A sweep over candidate tiles.

    Args:
        bench: what to measure with.
        left: seconds left.
        compilation: compiles the candidates.
        shared_bytes: shared memory that a program may take.
        survivors: candidates by entry, where a static sweep chose some.
        usual: the tile in use.
        tried: every candidate with its time or its reason, as JSON values.
        arch: name of the GPU's architecture.
    """

    bench: Bench
    left: Callable[[], float]
    compilation: Compilation
    shared_bytes: int
    survivors: Mapping[TableEntry, list[TileConfig]] = field(default_factory=dict)
    usual: Callable[[TableEntry], TileConfig] = lambda p: tiles.lookup(
        p.kernel, p.element_size, p.BLOCK_D
    )
    tried: list[dict[str, Any]] = field(default_factory=list)
    arch: str = "interpreter"

    def all_tiles(self, entry: TableEntry) -> list[TileConfig]:
        """The tile in use, then the candidates."""
        usual = self.usual(entry)
        others = self.survivors.get(entry) or candidates(entry, self.shared_bytes, self.arch)
        return [usual, *(tile for tile in others if tile != usual)]

    def sweep(self, entries: tuple[TableEntry, ...] = ENTRIES) -> Iterator[dict[str, Any]]:
        """Yield the fastest tile of each entry, as a row of the table, as soon as it is known."""
        for entry in entries:
            for tile in self.all_tiles(entry):
                self.compilation.submit(entry, tile)
        for entry in entries:
            if self.left() <= 0:
                return
            row = self._tune(entry)
            release(entry.case(True).device)
            if row is not None:
                yield row

    def _tune(self, entry: TableEntry) -> dict[str, Any] | None:
        glances: dict[TileConfig, float] = {}
        with _Trial(entry, entry.case(causal=True), self.bench) as trial:
            for tile in self.all_tiles(entry):
                if self.left() <= 0:
                    break
                why_not = self.compilation.why_not(entry, tile, self.left())
                outcome: float | str
                outcome = trial.time([tile], _GLANCE)[tile] if why_not is None else why_not
                self._note(entry, tile, outcome)
                if isinstance(outcome, float):
                    glances[tile] = outcome
            finalists = sorted(glances, key=glances.__getitem__)[:_FINALISTS]
            usual = self.usual(entry)
            if usual in glances and usual not in finalists:
                finalists.append(usual)
            causal = trial.time(finalists, self.bench.effort)
        with _Trial(entry, entry.case(causal=False), self.bench) as trial:
            full = trial.time(finalists, self.bench.effort)
        # Causal has half of the pairs, hence the factor: both masks get the same weight.
        scores = {
            tile: 2 * a + b
            for tile in finalists
            if isinstance(a := causal[tile], float) and isinstance(b := full[tile], float)
        }
        if not scores:
            return None
        best = min(scores, key=scores.__getitem__)
        times = {"ms": causal[best], "ms_full": full[best]}
        return {**asdict(entry), **asdict(best), "source": "measured", **times}

    def _note(self, entry: TableEntry, tile: TileConfig, outcome: float | str) -> None:
        field = "ms" if isinstance(outcome, float) else "reason"
        self.tried.append({**asdict(entry), **asdict(tile), field: outcome})


class _Trial:
    """Times tiles of one kernel on one case; the other kernels keep their tiles in use."""

    def __init__(self, entry: TableEntry, case: Case, bench: Bench) -> None:
        self._entry, self._case, self._bench = entry, case, bench
        self._inputs: Inputs | None = None
        self._expected: Expected | None = None

    def __enter__(self) -> _Trial:
        self._inputs = make_inputs(self._case)
        self._expected = self._bench.expected(self._case, self._inputs)
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs = self._expected = None

    def time(self, tiles: list[TileConfig], effort: Effort) -> dict[TileConfig, float | str]:
        """Median milliseconds of each tile, or why it has none."""
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
        """A call with the tile forced; its results have passed the error budget."""
        assert self._inputs is not None and self._expected is not None
        forced = {self._entry.kernel: tile}
        name = ONE_PASS if self._entry.kernel == "backward_one_pass" else OURS
        ours = next(i for i in IMPLEMENTATIONS if i.name == name)
        with tiles.forced(**forced):
            work, _ = prepare(ours, self._case, self._inputs, self._expected)

        def call() -> object:
            with tiles.forced(**forced):
                return work()

        return call


def merge(table: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A table with rows in place of those for the same kernel, element size and D."""

    def entry(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["kernel"], row["element_size"], row["BLOCK_D"]

    fresh = {entry(row): row for row in rows}
    kept = [fresh.pop(entry(row), row) for row in table["rows"]]
    return {**table, "rows": [*kept, *fresh.values()]}


def table_text(table: dict[str, Any]) -> str:
    """A table as the files in kernels/launch/tuning hold it: one row a line."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    rest = {name: value for name, value in table.items() if name != "rows"}
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in rest.items())
    return f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'


def provenance(environment: dict[str, Any], command: str) -> dict[str, str]:
    """The fields of a measured row that name its GPU, versions, date and command."""
    versions = environment.get("versions", {})
    return {
        "gpu": str((environment.get("gpu") or {}).get("name")),
        "torch": versions.get("torch", ""),
        "triton": versions.get("triton", ""),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
    }


def tune(
    out: Path,
    bench: Bench,
    left: Callable[[], float],
    environment: dict[str, Any],
    command: str,
    survivors: Mapping[TableEntry, list[TileConfig]] | None = None,
    rows: Sequence[dict[str, Any]] = (),
    tried: Sequence[dict[str, Any]] = (),
) -> Iterator[tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Tune the kernels on the current GPU, and rewrite the table under `out` after each row.

    survivors: the Pareto sets of a static sweep, timed in place of all candidates.
    rows, tried: of an earlier sweep, which this one continues.

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
    done = {TableEntry(row["kernel"], row["element_size"], row["BLOCK_D"]) for row in measured}
    path = out / f"{name}.json"
    try:
        for row in tuner.sweep(tuple(entry for entry in ENTRIES if entry not in done)):
            measured.append(row | source)
            write_whole(path, table_text(merge(table, measured)))
            yield path, measured, tuner.tried
    finally:
        compilation.close()


def effort_for(seconds: float) -> Effort:
    """How long to measure finalists in a sweep of so many seconds."""
    return replace(Effort(), target_ms=60.0 if seconds < 600 else 200.0, pause=0.1)


def deadline(seconds: float) -> Callable[[], float]:
    """Seconds left until `seconds` from now."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
