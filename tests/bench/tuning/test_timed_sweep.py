"""The timed sweep, in the interpreter: candidates, checks, and the table it writes."""

import json
import math
from concurrent.futures import Future
from dataclasses import replace
from importlib import resources

import pytest

from fastattn.bench.attention import Bench
from fastattn.bench.cases import Case
from fastattn.bench.measure import Effort, HostTimer
from fastattn.bench.tuning import timed_sweep
from fastattn.bench.tuning.candidates import BY_KEYS
from fastattn.bench.tuning.static_sweep import survivor
from fastattn.bench.tuning.timed_sweep import ENTRIES, Compilation, TableEntry, Tuner, candidates
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing.compiling.compile_pool import CompilePool

H200_SHARED = 227 * 1024
QUICK = Effort(warm_up=0, target_ms=0, least=1, most=1, pause=0)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_every_entry_has_candidates_that_fit(entry):
    found = candidates(entry, H200_SHARED, "sm_90")
    assert len(found) == len(set(found)) >= 4
    for tile in found:
        held, streamed = tile.BLOCK_M, tile.BLOCK_N
        if entry.kernel in BY_KEYS:
            held, streamed = streamed, held
        copies = 2 if entry.kernel.startswith("backward") else 1
        elements = copies * held * entry.BLOCK_D + 2 * tile.num_stages * streamed * entry.BLOCK_D
        assert elements * entry.element_size <= H200_SHARED


def test_candidates_differ_from_the_tile_in_use_by_no_more_than_they_say():
    """Equal parts of sums; TMA loads too on GPUs with TMA, for kernels that take descriptors."""
    entry = TableEntry("forward", 2, 64)
    for arch, loads, parts in (
        ("sm_90", {True, False}, 4),
        ("sm_80", {False}, 4),
        ("gfx942", {False}, 1),
    ):
        found = candidates(entry, H200_SHARED, arch)
        assert {tile.descriptors for tile in found} == loads
        assert {tile.sum_parts for tile in found} == {parts}
    backward = candidates(TableEntry("backward_dq", 2, 64), H200_SHARED, "sm_90")
    assert not any(tile.descriptors for tile in backward)


def test_entries_cover_the_table_and_begin_with_what_matters():
    assert {p.kernel for p in ENTRIES} == {*tiles.KERNELS, "decode", "decode_chunk"}
    assert {(p.element_size, p.BLOCK_D) for p in ENTRIES} == {
        (size, D) for size in (2, 4) for D in (64, 128, 256)
    }
    assert ENTRIES[0] == TableEntry("forward", 2, 128)
    case = TableEntry("backward_dq", 2, 64).case(causal=True)
    assert (case.B * case.T_q, case.H_q * case.D, case.direction) == (16384, 2048, "backward")
    case = TableEntry("decode_chunk", 2, 128).case(causal=False)
    assert (case.family, case.H_q // case.H_k, case.T_q, case.causal) == ("decode", 4, 64, True)


TABLE = {
    "device": "Imaginary GPU",
    "rows": [
        {"kernel": "forward", "element_size": 2, "BLOCK_D": 64, "BLOCK_M": 16},
        {"kernel": "forward", "element_size": 2, "BLOCK_D": 128, "BLOCK_M": 16},
    ],
}


def test_rows_are_put_in_place():
    measured = {"kernel": "forward", "element_size": 2, "BLOCK_D": 128, "BLOCK_M": 64, "ms": 1.0}
    new = {"kernel": "forward", "element_size": 4, "BLOCK_D": 64, "BLOCK_M": 32}
    found = timed_sweep.merge(TABLE, [measured, new])
    assert found["rows"] == [TABLE["rows"][0], measured, new]
    assert found["device"] == "Imaginary GPU"


def test_tables_are_written_as_they_are_kept():
    assert json.loads(timed_sweep.table_text(TABLE)) == TABLE
    text = (
        resources.files("fastattn.kernels").joinpath("launch/tuning/sm_90.json").read_text("utf-8")
    )
    assert timed_sweep.table_text(json.loads(text)) == text


class NoCompilation(Compilation):
    """Nothing is compiled ahead; some tiles are known not to be worth a launch."""

    def __init__(self, refused=()):
        super().__init__("an unknown architecture", 1)
        self.refused = refused

    def why_not(self, entry, tile, seconds):
        return "spills 8 bytes a thread" if tile in self.refused else None


A, B, C = (TileConfig(32, 16), TileConfig(16, 32), TileConfig(16, 16))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Tiles are timed on a small case that the interpreter can run, among three tiles."""

    def small(entry, causal):
        if entry.kernel.startswith("decode"):
            return Case(
                "decode",
                "forward",
                1,
                1,
                1,
                1,
                40,
                16,
                True,
                dtype="float32",
                layout="bhtd",
                device="cpu",
            )
        direction = "forward" if entry.kernel == "forward" else "backward"
        return Case(
            direction, direction, 1, 1, 1, 40, 40, 16, causal, dtype="float32", device="cpu"
        )

    monkeypatch.setattr(TableEntry, "case", small)
    monkeypatch.setattr(timed_sweep, "candidates", lambda entry, shared, arch: [A, B, C])


def tuner(times, left=lambda: 1.0, refused=()):
    """A sweep in which tiles take the given milliseconds."""
    bench = Bench(FakeTimer(times), QUICK, sleep=lambda seconds: None)
    return Tuner(bench, left, NoCompilation(refused), H200_SHARED, usual=lambda entry: A)


class FakeTimer(HostTimer):
    """A call takes the time of the tile that is in force while it runs."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def prepare(self, function):
        used = []
        lookup = tiles.lookup

        def remember(kernel, *sizes, **kind):
            used.append((kernel, lookup(kernel, *sizes, **kind)))
            return used[-1][1]

        def start():
            call_memo.forget()
            launches.forget()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiles, "lookup", remember)
                function()
            # A call that becomes a known one looks its tile up twice.
            ms = sum(self.times.get(tile, 0.0) for tile in set(used))
            del used[:]
            return lambda: ms

        return start


@pytest.mark.parametrize("kernel", [*tiles.KERNELS, "decode"])
def test_the_fastest_tile_is_found_and_forced_for_its_kernel_alone(on_the_cpu, kernel):
    sweep = tuner({(kernel, A): 3.0, (kernel, B): 1.0, (kernel, C): 2.0})
    row = next(sweep.sweep((TableEntry(kernel, 4, 16),)))
    assert (row["BLOCK_M"], row["BLOCK_N"]) == (B.BLOCK_M, B.BLOCK_N)
    assert (row["kernel"], row["source"], row["ms"], row["ms_full"]) == (kernel, "measured", 1, 1)
    assert [entry["ms"] for entry in sweep.tried] == [3.0, 1.0, 2.0]


def test_survivors_of_a_static_sweep_are_the_candidates(on_the_cpu):
    entry = TableEntry("forward", 4, 16)
    sweep = tuner({})
    sweep.survivors = {entry: [C, A]}
    assert sweep.all_tiles(entry) == [A, C]
    assert sweep.all_tiles(TableEntry("forward", 2, 16)) == [A, B, C]


def test_tiles_that_spill_are_not_tried(on_the_cpu):
    sweep = tuner({("forward", A): 3.0, ("forward", C): 2.0}, refused=(B,))
    row = next(sweep.sweep((TableEntry("forward", 4, 16),)))
    assert row["BLOCK_M"] == C.BLOCK_M
    assert sweep.tried[1]["reason"] == "spills 8 bytes a thread"


def test_tiles_that_compute_something_else_are_not_timed(on_the_cpu, monkeypatch):
    check = timed_sweep.prepare

    def prepare(*arguments):
        if tiles.lookup("forward", 4, 16) == B:
            raise AssertionError("o: error 1 exceeds the budget 0")
        return check(*arguments)

    monkeypatch.setattr(timed_sweep, "prepare", prepare)
    sweep = tuner({("forward", A): 3.0, ("forward", B): 1.0, ("forward", C): 2.0})
    row = next(sweep.sweep((TableEntry("forward", 4, 16),)))
    assert row["BLOCK_M"] == C.BLOCK_M
    assert "exceeds the budget" in sweep.tried[1]["reason"]


def test_a_sweep_ends_in_time(on_the_cpu):
    left = iter([1.0, 1.0, *[-1.0] * 100])
    sweep = tuner({}, left=lambda: next(left))
    rows = list(sweep.sweep((TableEntry("forward", 4, 16), TableEntry("forward", 2, 16))))
    assert [row["element_size"] for row in rows] == [4]
    assert len(sweep.tried) == 1


def test_a_table_is_written_after_every_row(on_the_cpu, tmp_path, monkeypatch):
    rows = [
        {"kernel": "forward", "element_size": 2, "BLOCK_D": 256, "BLOCK_M": 64, "ms": 1.0},
        {"kernel": "forward", "element_size": 4, "BLOCK_D": 256, "BLOCK_M": 32, "ms": 2.0},
    ]
    asked = []

    def sweep(self, entries):
        asked.append(entries)
        return iter(rows)

    monkeypatch.setattr(Tuner, "sweep", sweep)
    properties = type("Properties", (), {"name": "Imaginary GPU"})
    monkeypatch.setattr(timed_sweep.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(timed_sweep.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tiles, "current_arch", lambda: "sm_90")
    bench = Bench(HostTimer(), QUICK)
    environment = {"gpu": {"name": "Imaginary GPU"}, "versions": {"torch": "0", "triton": "1"}}
    steps = timed_sweep.tune(tmp_path, bench, lambda: 1.0, environment, "python tune.py")
    path, _, _ = next(steps)
    assert path == tmp_path / "sm_90.json"
    first = json.loads(path.read_text())["rows"]
    assert len(first) == len(tiles.table("sm_90"))
    found = next(r for r in first if (r["element_size"], r["BLOCK_D"]) == (2, 256) and "ms" in r)
    assert (found["gpu"], found["triton"], found["BLOCK_M"]) == ("Imaginary GPU", "1", 64)
    assert next(steps)[1][1]["command"] == "python tune.py"
    # A second call goes on: it keeps the rows there are, and asks for those that are not.
    before = [{**rows[1], "ms": 3.0}]
    steps = timed_sweep.tune(
        tmp_path, bench, lambda: 1.0, environment, "again", rows=before, tried=[{"ms": 9.0}]
    )
    _, both, tried = next(steps)
    assert [row["ms"] for row in both] == [3.0, 1.0]
    assert tried == [{"ms": 9.0}]
    assert set(asked[0]) - set(asked[1]) == {TableEntry("forward", 4, 256)}
    shipped = {row.get("ms") for row in tiles.table("sm_90")}
    assert not shipped & {1.0, 3.0}
    kept = [row.get("ms") for row in json.loads(path.read_text())["rows"]]
    assert sorted(ms for ms in kept if ms not in shipped) == [1.0, 3.0]


def test_candidates_are_compiled_ahead():
    """For a GPU that is not there; the tiles' registers and shared memory come back."""
    compilation = Compilation("sm_90", 1)
    entry = TableEntry("forward", 2, 64)
    fits, too_large = TileConfig(64, 32, 4, 1), TileConfig(128, 128, 8, 8)
    as_long_as_it_takes = 1e6
    try:
        for tile in (fits, too_large):
            compilation.submit(entry, tile)
        assert compilation.why_not(entry, fits, as_long_as_it_takes) is None
        assert "shared memory" in compilation.why_not(entry, too_large, as_long_as_it_takes)
        entry, tile = TableEntry("decode", 2, 64), TileConfig(16, 64, 4, 1)
        compilation.submit(entry, tile)
        facts = compilation.facts(entry, tile)
        assert survivor(entry, tile, facts).cycles > 0
        compilation.submit(entry, TileConfig(16, 48, 4, 1))  # no power of two
        assert compilation.facts(entry, TileConfig(16, 48, 4, 1)) is None
    finally:
        compilation.close()


def test_a_candidate_that_is_not_compiled_in_time_is_passed_over(monkeypatch):
    """Python 3.10 has two TimeoutErrors."""
    monkeypatch.setattr(CompilePool, "submit", lambda *args, **kwargs: Future())
    compilation = Compilation("sm_90", 1)
    compilation.submit(ENTRIES[0], A)
    assert compilation.why_not(ENTRIES[0], A, 0) == "was not compiled in time"
    compilation.close()


def test_an_unknown_architecture_is_compiled_at_the_launch():
    compilation = Compilation("sm_999", 1)
    compilation.submit(ENTRIES[0], A)
    assert compilation.why_not(ENTRIES[0], A, 0) is None
    compilation.close()


def test_effort_grows_with_the_time():
    assert timed_sweep.effort_for(60).target_ms < timed_sweep.effort_for(3600).target_ms
    assert math.isclose(replace(timed_sweep.effort_for(60)).pause, 0.1)
