"""Which tiles are worth a GPU's time, from what the compilers make of them.

A tile is out if it spills in any of the calls that are compiled, does not fit shared memory, or is
no better than another in anything that a model of the GPU tells: how long the loop over full blocks
keeps the busiest unit, what it loads, how far ahead, and how much shared memory it takes from other
programs.
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
from .candidates import BY_KEYS, KERNEL_OF, PLACES, Compilation, Place, candidates
from .timed_sweep import merge, table_text

# Cycles of a scheduler for one instruction of a warp: MUFU has 4 lanes of 32 (CUDA C++ Programming
# Guide, "Arithmetic Instructions": 16 results a clock and multiprocessor).
_MUFU_CYCLES = 8
# For HMMA.16816, from the dense fp16 rates with fp32 sums of the GPUs' white papers: 1024 multiply-
# adds a clock and multiprocessor on sm_80, 256 on the consumer chips.
_HMMA_CYCLES = {"sm_80": 8, "sm_86": 32, "sm_89": 32, "sm_90": 8, "sm_100": 8}


@dataclass(frozen=True)
class Survivor:
    """A tile that compiles well.

    cycles: modelled, of one multiprocessor for a pair of query and key in a full block; None where
        the assembly of the loop is not known, on AMD and for fp32.
    loaded_bytes: from beyond shared memory, or added there, for a pair.
    """

    tile: TileConfig
    cycles: float | None
    loaded_bytes: float
    shared_bytes: int

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """What less of is better; stages of loads hide how long those take."""
        ahead = self.tile.num_stages
        return self.cycles or 0.0, self.loaded_bytes, -float(ahead), float(self.shared_bytes)


def loop_cycles(loop: Loop, target: str) -> float:
    """How long one pass of a warp keeps the busiest of issue, MUFU and matrix unit."""
    matrix = 0.0
    for opcode, number in loop.opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind == "HGMMA":  # 64xNx16, by a warp group; 2048 multiply-adds a clock
            matrix += number * int(modifiers[0].split("x")[1]) / 2
        elif kind == "HMMA":
            matrix += number * _HMMA_CYCLES.get(target, 8)
    return max(float(loop.total), float(_MUFU_CYCLES * loop.count("MUFU")), matrix)


def survivor(place: Place, tile: TileConfig, facts: Iterable[CompiledFacts]) -> Survivor | None:
    """The tile with its costs, or None if it spills or does not fit in any of `facts`."""
    found = [fact for fact in facts if fact.name == KERNEL_OF[place.kernel]]
    if not found or any(fact.spills or not fact.fits_shared_memory for fact in found):
        return None
    # Each scheduler has a quarter of the warps.
    full = [min(fact.loops, key=lambda loop: loop.total) for fact in found if fact.loops]
    passes = [loop_cycles(loop, found[0].target) for loop in full]
    pairs = tile.BLOCK_M * tile.BLOCK_N
    held = tile.BLOCK_N if place.kernel in BY_KEYS else tile.BLOCK_M
    columns = 2 * place.BLOCK_D * place.element_size
    if place.kernel == "backward_one_pass":
        columns += 4 * place.BLOCK_D  # those of dQ that are added, in fp32
    return Survivor(
        tile,
        max(passes) * tile.num_warps / 4 / pairs if passes else None,
        columns / held,
        max(fact.shared_bytes for fact in found),
    )


def pareto(survivors: Iterable[Survivor]) -> list[Survivor]:
    """Those that no other is at least as good as in every cost, the fewest cycles first."""
    kept: list[Survivor] = []
    for candidate in sorted(survivors, key=lambda s: s.costs):
        if not any(
            all(a <= b for a, b in zip(s.costs, candidate.costs, strict=True)) for s in kept
        ):
            kept.append(candidate)
    return kept


def sweep(
    target: str, places: Iterable[Place], compilation: Compilation
) -> Iterator[tuple[Place, list[Survivor]]]:
    """The Pareto set of each place, the tile to take first, as soon as it is known."""
    places = list(places)
    shared = TARGETS[target].shared_bytes
    tried = {place: candidates(place, shared, target) for place in places}
    for place in places:
        for tile in tried[place]:
            compilation.submit(place, tile)
    for place in places:
        found = []
        for tile in tried[place]:
            facts = compilation.facts(place, tile)
            if facts is not None and (one := survivor(place, tile, facts)) is not None:
                found.append(one)
        yield place, pareto(found)


def write(out: Path, target: str, found: Mapping[Place, list[Survivor]]) -> tuple[Path, Path]:
    """The table with the first of each Pareto set, and the sets as `read` takes them."""
    name = tiles.table_for(target)
    rows = [
        {**asdict(place), **asdict(best[0].tile), "source": "modelled"}
        for place, best in found.items()
        if best
    ]
    device = json.loads(_table_file(name))["device"]
    table = {"device": device, "rows": list(tiles.table(name))}
    sets = [{**asdict(place), "tiles": [asdict(s) for s in found[place]]} for place in found]
    paths = out / f"{name}.json", out / f"{name}.survivors.json"
    write_whole(paths[0], table_text(merge(table, rows)))
    write_whole(paths[1], json.dumps({"target": target, "sets": sets}, indent=1) + "\n")
    return paths


def _table_file(name: str) -> str:
    return (Path(tiles.__file__).parent / "tuning" / f"{name}.json").read_text("utf-8")


def read(path: Path) -> dict[Place, list[TileConfig]]:
    """The tiles of a file that `write` made, by place."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {
        Place(s["kernel"], s["element_size"], s["BLOCK_D"]): [
            TileConfig(**tile["tile"]) for tile in s["tiles"]
        ]
        for s in data["sets"]
    }


def named_places(names: Iterable[str]) -> list[Place]:
    """From "forward:2:128": kernel, bytes of an element, head dim.

    Raises:
        ValueError: no such place.
    """
    by_name = {f"{p.kernel}:{p.element_size}:{p.BLOCK_D}": p for p in PLACES}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"places must be among {', '.join(by_name)}, got {unknown[0]!r}")
    return [by_name[name] for name in names]
