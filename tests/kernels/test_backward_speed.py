"""Modelled clocks of the portable backward at head dim 128 on sm_90, beside an H100's times.

Shared memory is what both kernels wait for by the model: it leaves bank conflicts and latencies
out, and where it and a measurement differ the table follows the measurement.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattn.bench.tuning.candidates import candidates
from fastattn.bench.tuning.entries import TableEntry
from fastattn.kernels.backward import launch_backward, launch_backward_one_pass
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.speed import Clocks, loop_clocks, programs_at_once

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
KERNEL, D, H100_BYTES = "backward_dkv", 128, 232448
# What the model has for the best.
BY_MODEL = TileConfig(64, 128, 8, 2)


def launch(forced: tuple[Any, ...] | None = None, one_pass: bool = False) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, lse = meta(1, 4, 1024, D), meta(1, 4, 1024, dtype=torch.float32)
    function = launch_backward_one_pass if one_pass else launch_backward
    with tiles.forced(**({} if forced is None else {KERNEL: TileConfig(*forced)})):
        function(q, None, q, q, q, q, lse, Options(scale=0.1))


def clocks_of(compile_pool: CompilePool, tile: TileConfig, **how: Any) -> Clocks:
    """Of a pair of query and key in a full block, where nothing spills."""
    facts = compile_pool.facts(f"{__file__}:launch", "sm_90", **how)
    (fact,) = (fact for fact in facts if fact.name == "attention_backward_dkv_kernel")
    full = min(fact.loops, key=lambda loop: loop.total)
    assert not fact.spills_in_loops or full.count("LDL", "STL") <= 10
    found = loop_clocks(full, "sm_90", tile.num_warps, programs=programs_at_once(fact))
    return found / (tile.BLOCK_M * tile.BLOCK_N)


def test_dk_and_dv_take_the_tile_that_was_measured(compile_pool: CompilePool) -> None:
    """The tuner tries the model's, too: on another GPU it may be the faster one."""
    probe = json.loads((RESULTS / "probes" / "h100-2026-11-22.json").read_text(encoding="utf-8"))
    times = {
        row["tile"]: row["ms"]
        for call in probe["calls"]
        for row in call["rows"]
        if row.get("job") == KERNEL and row["D"] == D and "ms" in row
    }
    shipped = tiles.tile_of("sm_90", KERNEL, 2, D)
    sizes = (shipped.BLOCK_M, shipped.BLOCK_N, shipped.num_warps, shipped.num_stages)
    assert str(sizes) == min(times, key=lambda tile: times[tile])
    assert times["(64, 128, 8, 2)"] == pytest.approx(1.08 * times[str(sizes)], rel=0.01)
    assert BY_MODEL in candidates(TableEntry(KERNEL, 2, D), H100_BYTES, "sm_90")
    assert clocks_of(compile_pool, BY_MODEL, forced=(64, 128, 8, 2)).bound <= 0.26
    assert clocks_of(compile_pool, shipped).bound <= 0.362


def test_one_pass(compile_pool: CompilePool) -> None:
    """Of the clocks of shared memory a pair has 1/32 for its additions of dQ: 512 bytes of 128
    pairs.
    """
    shipped = tiles.tile_of("sm_90", "backward_one_pass", 2, D)
    found = clocks_of(compile_pool, shipped, one_pass=True)
    assert found.bound <= 0.391
    assert found.bound - 1 / 32 <= 0.36
