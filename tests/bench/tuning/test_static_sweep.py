"""The static sweep: the tiles it keeps, and the files it writes."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastattn.bench.tuning import static_check, static_sweep
from fastattn.bench.tuning.ahead import Compilation
from fastattn.bench.tuning.candidates import candidates
from fastattn.bench.tuning.choices import Candidate, Choice
from fastattn.bench.tuning.entries import TableEntry
from fastattn.bench.tuning.static_sweep import Survivor, pareto, survivor
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.sass import Loop

ENTRY = TableEntry("forward", 2, 64)
TILE = TileConfig(128, 64, 8, 2)


def fact(
    name: str = "attention_forward_kernel",
    spilled: int = 0,
    fits: bool = True,
    loops=(),
    shared: int = 1000,
):
    found = CompiledFacts(
        name=name,
        target="sm_90",
        num_warps=8,
        num_stages=2,
        shared_bytes=shared,
        fits_shared_memory=fits,
        registers=100,
        spill_store_bytes=spilled,
        spill_load_bytes=0,
        mma=frozenset(),
        wgmma_register_a=0,
        warnings=(),
        code=None,
    )
    vars(found)["loops"] = loops
    return found


LOOPS = (Loop(0, {"FFMA": 4096, "FSEL": 1}), Loop(1, {"FFMA": 2048}))


def test_a_tile_is_weighed_by_its_loop_over_full_blocks() -> None:
    found = survivor(ENTRY, TILE, [fact(loops=LOOPS), fact("other", spilled=8)])
    # Two warps a scheduler, 2048 cycles each, for 128 x 64 pairs.
    assert found == Survivor(TILE, 2 * 2048 / (128 * 64), 2 * 64 * 2 / 128, 1000)
    by_keys = survivor(
        TableEntry("backward_dkv", 2, 64),
        TILE,
        [fact("attention_backward_dkv_kernel", loops=LOOPS)],
    )
    assert by_keys is not None and by_keys.loaded_bytes == 2 * 64 * 2 / 64
    one_pass = survivor(
        TableEntry("backward_one_pass", 2, 64),
        TILE,
        [fact("attention_backward_dkv_kernel", loops=LOOPS)],
    )
    # It loads the same, and adds rows of fp32.
    assert one_pass is not None and one_pass.loaded_bytes == (2 * 64 * 2 + 64 * 4) / 64


def test_a_launch_for_each_gradient_costs_the_sum_of_both() -> None:
    calls = [LOOPS[1:], LOOPS[:1], LOOPS, LOOPS[:1]]
    facts = [fact("attention_backward_dkv_kernel", loops=loops) for loops in calls]
    tile = TileConfig(32, 128, 8, 2, apart=True)
    found = survivor(TableEntry("backward_dkv", 2, 256), tile, facts)
    assert found is not None
    assert found.cycles == 2 * (2048 + 4097) / (32 * 128)
    assert found.loaded_bytes == 2 * (2 * 256 * 2) / 128


def test_wide_heads_are_tried_with_a_launch_for_each_gradient() -> None:
    for D, tried in ((128, {False}), (256, {False, True})):
        found = candidates(TableEntry("backward_dkv", 2, D), 227 * 1024, "sm_90")
        assert {tile.apart for tile in found} == tried
    assert TileConfig(32, 128, 8, 2, apart=True) in found


def test_programs_that_share_a_multiprocessor_overlap() -> None:
    """128 threads wait for their products alone, unless shared memory has room for another 128."""
    tile = TileConfig(64, 64, 4, 2)
    loop = Loop(0, {"HGMMA.64x64x16.F32.BF16": 8, "MUFU.EX2": 32, "FADD": 60}, overlap=0.0)
    alone = survivor(ENTRY, tile, [fact(loops=(loop,), shared=120 * 1024)])
    both = survivor(ENTRY, tile, [fact(loops=(loop,), shared=110 * 1024)])
    assert alone is not None and alone.cycles == 512 / 64**2
    assert both is not None and both.cycles == 256 / 64**2


def test_few_bytes_may_spill_outside_loops() -> None:
    inside = (Loop(0, {"FFMA": 9, "LDL": 1}),)
    assert survivor(ENTRY, TILE, [fact(spilled=64, loops=LOOPS)]) is not None
    assert survivor(ENTRY, TILE, [fact(spilled=68, loops=LOOPS)]) is None
    assert survivor(ENTRY, TILE, [fact(spilled=4, loops=inside)]) is None


def test_a_row_is_told_where_it_spills_and_what_it_waits_for() -> None:
    loops = (Loop(0, {"FFMA": 2045, "LDG.E": 2, "LDL": 1}), LOOPS[0])
    found = fact(spilled=4, fits=False, shared=300 * 1024, loops=loops)
    told = static_check.line(ENTRY, "sm_90", found).split(", ")
    assert told[:4] == ["100 registers", "300 KB", "does not fit", "spills 4 bytes"]
    assert told[4:] == [
        "no matrix instructions",
        "1 spilled in loops",
        "2048 instructions",
        "2 loads",
        f"{2 * 2048 / (128 * 64):.3f} clocks",
        f"{2 * 2045 / (128 * 64):.3f} of products",
    ]


class Masked(Compilation):
    """A causal call takes more registers than one without a mask, and launches another kernel."""

    def __init__(self) -> None:
        super().__init__("an unknown architecture", 1)

    def facts(self, choice: Choice, candidate: Candidate) -> list[list[CompiledFacts]] | None:
        if choice.key["BLOCK_D"] == 128:
            return None
        causal, full = (replace(fact(), registers=number) for number in (180, 150))
        return [[causal, fact("other")], [full]]


def test_a_row_is_told_for_each_mask() -> None:
    rows = [ENTRY, TableEntry("forward", 2, 128)]
    told = [line.split(" registers")[0] for line in static_check.check("sm_80", rows, Masked())]
    assert told == [
        "forward:2:64 (128, 64, 8, 3) causal: 180",
        "forward:2:64 (128, 64, 8, 3) full: 150",
        "forward:2:128: does not compile",
    ]


def test_a_tile_is_timed_unless_its_loops_spill() -> None:
    few, many = ((Loop(0, {"FFMA": 300, "LDL": number}),) for number in (3, 4))
    assert not fact(spilled=400, loops=few).spills_in_loops
    assert fact(spilled=4, loops=many).spills_in_loops
    assert fact(spilled=4).spills_in_loops
    assert not fact().spills_in_loops


def test_no_candidate_has_warps_without_rows() -> None:
    """wgmma takes 64 rows for each group of four warps."""
    for kernel in ("forward", "backward_dkv", "backward_one_pass"):
        entry = TableEntry(kernel, 2, 128)
        found = candidates(entry, 227 * 1024, "sm_90")
        held = [t.BLOCK_M if kernel == "forward" else t.BLOCK_N for t in found]
        assert all(
            rows < 64 or rows >= 16 * t.num_warps for rows, t in zip(held, found, strict=True)
        )
        assert any(rows >= 128 for rows in held)


def test_without_loops_there_are_no_cycles() -> None:
    found = survivor(ENTRY, TILE, [fact()])
    assert found is not None and found.cycles is None


@pytest.mark.parametrize(
    "facts", [[fact(), fact(spilled=4)], [fact(fits=False)], [fact("other")], []], ids=str
)
def test_a_tile_that_does_not_compile_well_is_out(facts: list[CompiledFacts]) -> None:
    assert survivor(ENTRY, TILE, facts) is None


def test_what_is_worse_in_everything_is_out() -> None:
    def made(cycles: float, loaded: float, stages: int, shared: int) -> Survivor:
        return Survivor(TileConfig(128, 64, 8, stages), cycles, loaded, shared)

    best, ahead, small = made(1, 1, 1, 9), made(1, 1, 2, 12), made(2, 2, 1, 4)
    worse = made(2, 2, 1, 9)
    assert pareto([worse, small, ahead, best, best]) == [ahead, best, small]


class Known(Compilation):
    """Every tile has one loop, as long as its tile is small; some tiles spill."""

    def __init__(self) -> None:
        super().__init__("an unknown architecture", 1)

    def facts(self, choice: Choice, candidate: Candidate) -> list[list[CompiledFacts]] | None:
        tile = TileConfig(**candidate.row)
        if tile.num_stages == 3:
            return None
        return [[fact(loops=(Loop(0, {"FFMA": 10_000}),), spilled=100 * (tile.num_warps == 4))]]


def test_a_sweep_leaves_a_table_and_its_survivors(tmp_path: Path) -> None:
    found = dict(static_sweep.sweep("sm_90", [ENTRY], Known()))
    kept = [s.tile for s in found[ENTRY]]
    assert kept[0] == TileConfig(128, 128, 8, 2, sum_parts=4)
    assert {tile.num_warps for tile in kept} == {8}
    table, sets = static_sweep.write(tmp_path, "sm_90", found)
    rows = json.loads(table.read_text())["rows"]
    assert len(rows) == len(tiles.table("sm_90"))
    (row,) = (
        r for r in rows if (r["kernel"], r["element_size"], r["BLOCK_D"]) == ("forward", 2, 64)
    )
    assert (row["BLOCK_M"], row["BLOCK_N"], row["source"]) == (128, 128, "modelled")
    assert static_sweep.read(sets) == {ENTRY: kept}


def test_an_entry_without_tiles_keeps_its_row(tmp_path: Path) -> None:
    table, _ = static_sweep.write(tmp_path, "sm_89", {ENTRY: []})
    assert table.name == "sm_86.json"
    assert json.loads(table.read_text())["rows"] == list(tiles.table("sm_86"))


def test_the_tool_sweeps_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).resolve().parents[3] / "bench" / "tune.py"
    spec = importlib.util.spec_from_file_location("tune", path)
    assert spec is not None and spec.loader is not None
    tune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tune)
    monkeypatch.setattr(tune, "Compilation", lambda target, workers: Known())
    arguments = ["--out", str(tmp_path), "--static", "sm_90", "--places", "decode:2:64"]
    assert tune.main(arguments) == 0
    assert "no tile fits" in capsys.readouterr().out
    assert static_sweep.read(tmp_path / "sm_90.survivors.json") == {TableEntry("decode", 2, 64): []}
