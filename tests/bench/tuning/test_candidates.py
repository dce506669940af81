"""Candidates: what is worth a compilation, and what compilers say of it."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from fastattn.bench.tuning.ahead import Compilation
from fastattn.bench.tuning.candidates import candidates, hopper_candidates, hopper_shipped
from fastattn.bench.tuning.choices import Choice, tile_candidate, tile_choice
from fastattn.bench.tuning.entries import (
    BY_KEYS,
    CALLS,
    DTYPES,
    ENTRIES,
    TableEntry,
    entries_named,
)
from fastattn.bench.tuning.static_sweep import survivor
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool

H200_SHARED = 227 * 1024
AS_LONG_AS_IT_TAKES = 1e6


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
    bias = candidates(TableEntry("backward_dq", 2, 64, "bias"), H200_SHARED, "sm_90")
    assert all(tile.descriptors for tile in bias)


def test_tiles_that_an_h100_measured_faster_are_candidates():
    """For head dim 64: bench/results/probes/h100-2026-11-22.json."""
    dkv = candidates(TableEntry("backward_dkv", 2, 64), H200_SHARED, "sm_90")
    assert {TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 3)} <= set(dkv)
    dq = candidates(TableEntry("backward_dq", 2, 64), H200_SHARED, "sm_90")
    assert TileConfig(64, 64, 4, 3) in dq


@pytest.mark.parametrize("kernel", tiles.HOPPER)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_shapes_for_hopper_differ_in_what_may_differ(kernel, D):
    usual, found = hopper_shipped(kernel, D), hopper_candidates(kernel, D)
    if usual is None:
        assert (kernel not in tiles.HOPPER_FORWARD, D, found) == (True, 256, [])
        return
    names = ["BLOCK", "STAGES", "PING_PONG", "SLACK"]
    three = [config for config in found if config.CONSUMERS == 3]
    assert bool(three) == (kernel in tiles.HOPPER_FORWARD and D <= 128)
    for config in three:  # 64512 registers for 128 threads of each, and of the producer
        assert 128 * (3 * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS) <= 64512
    if kernel == "hopper_one_pass":
        names.append("DQ_BY_TMA")
    if three:
        names += ["CONSUMERS", "CONSUMER_REGISTERS", "PRODUCER_REGISTERS"]
    free = {name: getattr(usual, name) for name in names}
    assert found and all(config._replace(**free) == usual != config for config in found)
    assert any(config.PING_PONG for config in found) == (kernel in tiles.HOPPER_FORWARD)
    if kernel == "hopper_fp8":
        assert {config.BLOCK for config in found} == {64, 128}
    always = [config for config in found if config.SLACK == 0]
    assert always == ([usual._replace(SLACK=0)] if kernel == "hopper_forward" else [])
    if kernel == "hopper_one_pass":
        assert all(config.BLOCK >= 64 for config in found)
        shapes = {(config.BLOCK, config.STAGES, config.DQ_BY_TMA) for config in found}
        assert (64, 2, False) in shapes
        # Four stages of Q and dO leave no room for tiles of dQ.
        assert ((64, 4, False) in shapes, (64, 4, True) in shapes) == (True, D == 64)
        # Two tiles of dS of 128 queries, and lse and delta of four stages, are too much.
        assert (128, 4, False) not in shapes


def test_entries_cover_the_table_and_begin_with_what_matters():
    assert {p.kernel for p in ENTRIES} == {*tiles.KERNELS, "decode", "decode_chunk"}
    assert {(p.element_size, p.BLOCK_D) for p in ENTRIES} == {
        (size, D) for size in DTYPES for D in (64, 128, 256)
    }
    assert ENTRIES[0] == TableEntry("forward", 2, 128)
    case = TableEntry("backward_dq", 2, 64).case(causal=True)
    assert (case.B * case.T_q, case.H_q * case.D, case.direction) == (16384, 2048, "backward")
    case = TableEntry("decode_chunk", 2, 128).case(causal=False)
    assert (case.family, case.H_q // case.H_k, case.T_q, case.causal) == ("decode", 4, 64, True)


def test_calls_of_a_class_are_of_the_class_of_their_kernels():
    """By the option or window with which they are timed."""
    for calls, (causal, full) in CALLS.items():
        for arguments in (causal, full):
            options = Options(
                left=arguments["window"][0] if "window" in arguments else None,
                **{name: object() for name in arguments.get("option", "").split("+") if name},
            )
            assert (options.registers or "plain") == calls


def test_entries_are_named():
    assert entries_named(["decode:2:64", "forward:4:128"]) == [
        TableEntry("decode", 2, 64),
        TableEntry("forward", 4, 128),
    ]
    with pytest.raises(ValueError, match=r"places must be among forward:2:128, .*got 'forward'"):
        entries_named(["forward"])


def of(entry: TableEntry, tile: TileConfig) -> tuple[Choice, object]:
    choice = tile_choice(entry, "sm_90", H200_SHARED, others=[tile])
    choice = replace(choice, cases=choice.cases[:1])
    return choice, tile_candidate(entry.kernel, entry.calls, tile)


def test_candidates_are_compiled_ahead():
    """For a GPU that is not there; the tiles' registers and shared memory come back."""
    compilation = Compilation("sm_90", 1)
    entry = TableEntry("forward", 2, 64)
    fits, too_large = (of(entry, t) for t in (TileConfig(64, 32, 4, 1), TileConfig(128, 128, 8, 8)))
    decode = TableEntry("decode", 2, 64)
    works, no_power = (of(decode, t) for t in (TileConfig(16, 64, 4, 1), TileConfig(16, 48, 4, 1)))
    try:
        for one in (fits, too_large, works, no_power):
            compilation.submit(*one)
        assert compilation.why_not(*fits, AS_LONG_AS_IT_TAKES) is None
        assert "shared memory" in compilation.why_not(*too_large, AS_LONG_AS_IT_TAKES)
        (facts,) = compilation.facts(*works)
        assert survivor(decode, TileConfig(16, 64, 4, 1), facts).cycles > 0
        assert compilation.facts(*no_power) is None
    finally:
        compilation.close()


def test_a_candidate_that_is_not_compiled_in_time_is_passed_over(monkeypatch):
    """Python 3.10 has two TimeoutErrors."""
    monkeypatch.setattr(CompilePool, "submit", lambda *args, **kwargs: Future())
    compilation = Compilation("sm_90", 1)
    one = of(ENTRIES[0], TileConfig(64, 64, 4, 1))
    compilation.submit(*one)
    assert compilation.why_not(*one, 0) == "was not compiled in time"
    compilation.close()


def test_an_unknown_architecture_is_compiled_at_the_launch():
    compilation = Compilation("sm_999", 1)
    one = of(ENTRIES[0], TileConfig(64, 64, 4, 1))
    compilation.submit(*one)
    assert compilation.why_not(*one, 0) is None
    compilation.close()


def test_tiles_of_fp32_are_small_and_on_sm_100_too_small_for_tensor_memory():
    for kernel in ("forward", "backward_dq", "backward_dkv", "backward_one_pass", "decode_chunk"):
        entry = TableEntry(kernel, 4, 64)
        sides = {
            arch: {max(t.BLOCK_M, t.BLOCK_N) for t in candidates(entry, H200_SHARED, arch)}
            for arch in ("sm_80", "sm_100")
        }
        assert (max(sides["sm_80"]), max(sides["sm_100"])) == (64, 32)
    assert TileConfig(64, 16, 4, 2) in candidates(TableEntry("forward", 4, 64), 163 * 1024, "sm_80")
