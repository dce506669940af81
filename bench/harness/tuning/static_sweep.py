"""Tiles chosen without a GPU: the Pareto set of a cost model that reads the compiled kernels.

Out are tiles that spill in any compiled call, tiles that exceed shared memory, and tiles that
another one beats or equals in every cost: cycles of the busiest unit in the loop over full blocks,
bytes loaded, stages of prefetch, and shared memory, which limits the programs a multiprocessor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig
from ...testing.compiling.cross_compile import TARGETS, CompiledFacts
from ...testing.compiling.sass import Loop
from ..results.report import write_whole
from .candidates import BY_KEYS, ENTRIES, KERNEL_OF, Compilation, TableEntry, candidates
from .timed_sweep import merge, table_text

# Cycles of a scheduler for one instruction of a warp: MUFU has 4 lanes of 32 (CUDA C++ Programming
# Guide, "Arithmetic Instructions": 16 results a clock and multiprocessor).
_MUFU_CYCLES = 8
# For HMMA.16816, from the dense fp16 rates with fp32 sums of the GPUs' white papers: 1024 multiply-
# adds a clock and multiprocessor on sm_80, 256 on the consumer chips.
_HMMA_CYCLES = {"sm_80": 8, "sm_86": 32, "sm_89": 32, "sm_90": 8, "sm_100": 8}


@dataclass(frozen=True)
class Survivor:
    """A tile of the Pareto set, with its modelled costs.

    cycles: modelled, of one multiprocessor for a pair of query and key in a full block; None where
        the assembly of the loop is not known, on AMD and for fp32.
    loaded_bytes: read from global memory, or added to it, for a pair.
    """

    tile: TileConfig
    cycles: float | None
    loaded_bytes: float
    shared_bytes: int

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """Costs to minimise. More stages hide more of the latency of loads: they count negative."""
        stages = float(self.tile.num_stages)
        return self.cycles or 0.0, self.loaded_bytes, -stages, float(self.shared_bytes)


def loop_cycles(loop: Loop, target: str) -> float:
    """Cycles of one loop pass of a warp on the busiest unit: issue, MUFU or tensor core."""
    matrix = 0.0
    for opcode, number in loop.opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind == "HGMMA":  # 64xNx16, by a warp group; 2048 multiply-adds a clock
            matrix += number * int(modifiers[0].split("x")[1]) / 2
        elif kind == "HMMA":
            matrix += number * _HMMA_CYCLES.get(target, 8)
    return max(float(loop.total), float(_MUFU_CYCLES * loop.count("MUFU")), matrix)


def survivor(
    entry: TableEntry, tile: TileConfig, facts: Iterable[CompiledFacts]
) -> Survivor | None:
    """The tile with its costs, or None if it spills or does not fit in any of `facts`."""
    found = [fact for fact in facts if fact.name == KERNEL_OF[entry.kernel]]
    if not found or any(fact.spills or not fact.fits_shared_memory for fact in found):
        return None
    # Each scheduler has a quarter of the warps.
    full = [min(fact.loops, key=lambda loop: loop.total) for fact in found if fact.loops]
    passes = [loop_cycles(loop, found[0].target) for loop in full]
    pairs = tile.BLOCK_M * tile.BLOCK_N
    held = tile.BLOCK_N if entry.kernel in BY_KEYS else tile.BLOCK_M
    columns = 2 * entry.BLOCK_D * entry.element_size
    if entry.kernel == "backward_one_pass":
        columns += 4 * entry.BLOCK_D  # dQ in fp32, by atomic adds
    return Survivor(
        tile,
        max(passes) * tile.num_warps / 4 / pairs if passes else None,
        columns / held,
        max(fact.shared_bytes for fact in found),
    )


def pareto(survivors: Iterable[Survivor]) -> list[Survivor]:
    """The tiles that no other beats or equals in every cost, the fewest cycles first."""
    kept: list[Survivor] = []
    for candidate in sorted(survivors, key=lambda s: s.costs):
        if not any(
            all(a <= b for a, b in zip(s.costs, candidate.costs, strict=True)) for s in kept
        ):
            kept.append(candidate)
    return kept


def sweep(
    target: str, entries: Iterable[TableEntry], compilation: Compilation
) -> Iterator[tuple[TableEntry, list[Survivor]]]:
    """Yield each entry with its Pareto set, best tile first, as soon as it is compiled."""
    entries = list(entries)
    shared = TARGETS[target].shared_bytes
    tried = {entry: candidates(entry, shared, target) for entry in entries}
    for entry in entries:
        for tile in tried[entry]:
            compilation.submit(entry, tile)
    for entry in entries:
        found = []
        for tile in tried[entry]:
            facts = compilation.facts(entry, tile)
            if facts is not None and (one := survivor(entry, tile, facts)) is not None:
                found.append(one)
        yield entry, pareto(found)


def write(out: Path, target: str, found: Mapping[TableEntry, list[Survivor]]) -> tuple[Path, Path]:
    """Write the tuning table with the best tile of each set, and the sets in a file for `read`."""
    name = tiles.table_for(target)
    rows = [
        {**asdict(entry), **asdict(best[0].tile), "source": "modelled"}
        for entry, best in found.items()
        if best
    ]
    device = json.loads(_table_file(name))["device"]
    table = {"device": device, "rows": list(tiles.table(name))}
    sets = [{**asdict(entry), "tiles": [asdict(s) for s in found[entry]]} for entry in found]
    paths = out / f"{name}.json", out / f"{name}.survivors.json"
    write_whole(paths[0], table_text(merge(table, rows)))
    write_whole(paths[1], json.dumps({"target": target, "sets": sets}, indent=1) + "\n")
    return paths


def _table_file(name: str) -> str:
    return (Path(tiles.__file__).parent / "tuning" / f"{name}.json").read_text("utf-8")


def read(path: Path) -> dict[TableEntry, list[TileConfig]]:
    """The Pareto sets in a file that `write` made."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {
        TableEntry(s["kernel"], s["element_size"], s["BLOCK_D"]): [
            TileConfig(**tile["tile"]) for tile in s["tiles"]
        ]
        for s in data["sets"]
    }


def entries_named(names: Iterable[str]) -> list[TableEntry]:
    """Entries by names like "forward:2:128": kernel, bytes of an element, head dim.

    Raises:
        ValueError: a name is unknown.
    """
    by_name = {f"{p.kernel}:{p.element_size}:{p.BLOCK_D}": p for p in ENTRIES}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"places must be among {', '.join(by_name)}, got {unknown[0]!r}")
    return [by_name[name] for name in names]
