"""Tiles chosen without a GPU: the Pareto set of a cost model that reads the compiled kernels.

Out are tiles that spill in the loops of any compiled call, tiles that exceed shared memory, and
tiles that another one beats or equals in every cost: clocks of the loop over full blocks by the
model of `fastattn.testing.compiling.speed`, bytes loaded, stages of prefetch, and shared memory,
which limits the programs a multiprocessor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig
from ...testing.compiling.cross_compile import TARGETS, CompiledFacts
from ...testing.compiling.sass import Loop
from ...testing.compiling.speed import Clocks, loop_clocks, programs_at_once
from ..results.report import write_whole
from . import tables
from .ahead import Compilation
from .choices import KERNEL_OF, tile_choice
from .entries import BY_KEYS, TableEntry


@dataclass(frozen=True)
class Survivor:
    """A tile of the Pareto set, with its modelled costs.

    cycles: modelled, of one multiprocessor for a pair of query and key in a full block; None where
        no loop is found.
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


def survivor(
    entry: TableEntry, tile: TileConfig, facts: Iterable[CompiledFacts]
) -> Survivor | None:
    """The tile with its costs, or None if it spills or does not fit in any of `facts`."""
    found = [fact for fact in facts if fact.name == KERNEL_OF[entry.kernel]]
    if not found or not all(fact.spills_little and fact.fits_shared_memory for fact in found):
        return None
    bounds = [full_block(entry, tile, fact).bound for fact in found if fact.loops]
    held = tile.BLOCK_N if entry.kernel in BY_KEYS else tile.BLOCK_M
    launches = 2 if tile.apart else 1  # of every call, in one order; each loads all it meets
    clocks = sum(max(bounds[n::launches], default=0.0) for n in range(launches))
    columns = 2 * entry.BLOCK_D * entry.element_size * launches
    if entry.kernel == "backward_one_pass":
        columns += 4 * entry.BLOCK_D  # dQ in fp32, by atomic adds
    return Survivor(
        tile,
        clocks if bounds else None,
        columns / held,
        max(fact.shared_bytes for fact in found),
    )


def full_block_loop(fact: CompiledFacts) -> Loop:
    """The loop over full blocks, the shortest."""
    return min(fact.loops, key=lambda loop: loop.total)


def full_block(entry: TableEntry, tile: TileConfig, fact: CompiledFacts) -> Clocks:
    """Clocks of a pair of query and key in the loop over full blocks."""
    loop = full_block_loop(fact)
    streamed = 2 * tile.BLOCK_N * entry.BLOCK_D * entry.element_size
    clocks = loop_clocks(
        loop,
        fact.target,
        tile.num_warps,
        programs=programs_at_once(fact),
        streamed_bytes=streamed if loop.count("UTMALDG") else 0,
    )
    return clocks / (tile.BLOCK_M * tile.BLOCK_N)


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
    shared = TARGETS[target].shared_bytes
    choices = {entry: tile_choice(entry, target, shared) for entry in entries}
    for choice in choices.values():
        for candidate in choice.candidates:
            compilation.submit(choice, candidate)
    for entry, choice in choices.items():
        found = []
        for candidate in choice.candidates:
            tile = TileConfig(**candidate.row)
            facts = compilation.facts(choice, candidate)
            one = None if facts is None else survivor(entry, tile, chain.from_iterable(facts))
            if one is not None:
                found.append(one)
        yield entry, pareto(found)


def write(out: Path, target: str, found: Mapping[TableEntry, list[Survivor]]) -> tuple[Path, Path]:
    """Write the tuning table with the best tile of each set, and the sets in a file for `read`."""
    name = tiles.table_for(target)
    rows = [
        {**_key(entry), **asdict(best[0].tile), "source": "modelled"}
        for entry, best in found.items()
        if best
    ]
    sets = [{**_key(entry), "tiles": [asdict(s) for s in found[entry]]} for entry in found]
    paths = out / f"{name}.json", out / f"{name}.survivors.json"
    write_whole(paths[0], tables.text(tables.merge(tables.read(name), rows)))
    write_whole(paths[1], json.dumps({"target": target, "sets": sets}, indent=1) + "\n")
    return paths


def _key(entry: TableEntry) -> dict[str, Any]:
    return {
        "kernel": entry.kind,
        "element_size": entry.element_size,
        "BLOCK_D": entry.BLOCK_D,
    }


def read(path: Path) -> dict[TableEntry, list[TileConfig]]:
    """The Pareto sets in a file that `write` made."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {
        TableEntry(s["kernel"], s["element_size"], s["BLOCK_D"]): [
            TileConfig(**tile["tile"]) for tile in s["tiles"]
        ]
        for s in data["sets"]
    }
