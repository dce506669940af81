"""Candidates: what is worth a compilation."""

import pytest

from fastattn.bench.tune.candidates import (
    BY_KEYS,
    CALLS,
    NEW_TOKENS,
    TableEntry,
    candidates,
    hopper_candidates,
    hopper_shipped,
)
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options

SHARED = 227 * 1024
KERNELS = ("forward", "backward_dkv", "backward_dq", "backward_one_pass", *NEW_TOKENS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_row_has_candidates_that_fit(kernel):
    for size in (2, 4):
        for D in (64, 128, 256):
            actual = candidates(TableEntry(kernel, size, D), SHARED, "sm_90")
            assert len(actual) == len(set(actual)) >= 4
            for tile in actual:
                held, streamed = tile.BLOCK_M, tile.BLOCK_N
                if kernel in BY_KEYS:
                    held, streamed = streamed, held
                copies = 2 if kernel.startswith("backward") else 1
                elements = copies * held * D + 2 * tile.num_stages * streamed * D
                assert elements * size <= SHARED
                # wgmma takes 64 rows for each group of four warps.
                assert held < 64 or held >= 16 * tile.num_warps
            wide = kernel == "backward_dkv" and D == 256
            assert {tile.apart for tile in actual} == ({False, True} if wide else {False})


@pytest.mark.parametrize(
    ("kernel", "calls", "arch", "loads", "parts"),
    [
        ("forward", "plain", "sm_90", {True, False}, 4),
        ("forward", "plain", "sm_80", {False}, 4),
        ("forward", "plain", "gfx942", {False}, 1),
        ("backward_dq", "plain", "sm_90", {False}, 1),
        ("backward_dq", "bias", "sm_90", {True}, 1),
    ],
)
def test_candidates_differ_from_the_tile_in_use_in_loads(kernel, calls, arch, loads, parts):
    """Equal parts of sums; TMA loads too on GPUs with TMA, for kernels that take descriptors."""
    actual = candidates(TableEntry(kernel, 2, 64, calls), SHARED, arch)
    assert {tile.descriptors for tile in actual} == loads
    assert {tile.sum_parts for tile in actual} == {parts}


def test_tiles_that_may_be_the_fastest_are_tried():
    for kernel, size, D, tile in (
        # Measured faster: bench/results/h100-2026-11-22-probes.json.
        ("backward_dkv", 2, 64, TileConfig(64, 64, 4, 3)),
        ("backward_dq", 2, 64, TileConfig(64, 64, 4, 3)),
        # The best by its instructions, which an H100 found the slower one: others may not.
        ("backward_dkv", 2, 128, TileConfig(64, 128, 8, 2)),
        ("backward_dkv", 2, 256, TileConfig(32, 128, 8, 2, apart=True)),
        ("forward", 4, 64, TileConfig(64, 16, 4, 2)),
    ):
        arch = "sm_90" if size == 2 else "sm_80"
        assert tile in candidates(TableEntry(kernel, size, D), SHARED, arch)


@pytest.mark.parametrize("kernel", ["forward", "backward_dq", "backward_dkv", "decode_chunk"])
def test_tiles_of_fp32_are_small_and_on_sm_100_too_small_for_tensor_memory(kernel):
    for arch, most in (("sm_80", 64), ("sm_100", 32)):
        actual = candidates(TableEntry(kernel, 4, 64), SHARED, arch)
        assert max(max(t.BLOCK_M, t.BLOCK_N) for t in actual) == most


@pytest.mark.parametrize("kernel", tiles.HOPPER)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_shapes_for_hopper_differ_in_what_may_differ(kernel, D):
    usual, actual = hopper_shipped(kernel, D), hopper_candidates(kernel, D)
    forward = kernel in tiles.HOPPER_FORWARD
    if usual is None:
        assert (forward, D, actual) == (False, 256, [])
        return
    three = [config for config in actual if config.CONSUMERS == 3]
    assert bool(three) == (forward and D <= 128)
    for config in three:  # 64512 registers for 128 threads of each, and of the producer
        assert 128 * (3 * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS) <= 64512
    names = ["BLOCK", "STAGES", "PING_PONG", "SLACK", "WIDE_WEIGHTS"]
    names += ["DQ_BY_TMA"] if kernel == "hopper_one_pass" else []
    names += ["CONSUMERS", "CONSUMER_REGISTERS", "PRODUCER_REGISTERS"] if three else []
    free = {name: getattr(usual, name) for name in names}
    assert actual and all(config._replace(**free) == usual != config for config in actual)
    assert any(config.PING_PONG for config in actual) == forward
    if kernel == "hopper_fp8":
        assert {config.BLOCK for config in actual} == {64, 128}
    always = [config for config in actual if config.SLACK == 0]
    assert always == ([usual._replace(SLACK=0)] if kernel == "hopper_forward" else [])
    if kernel == "hopper_one_pass":
        shapes = {(config.BLOCK, config.STAGES, config.DQ_BY_TMA) for config in actual}
        # Four stages of Q and dO leave no room for tiles of dQ; two tiles of dS of 128 queries, and
        # lse and delta of four stages, are too much.
        assert shapes >= {(64, 2, False), (64, 4, False)}
        assert ((64, 4, True) in shapes) == (D == 64)
        assert not shapes & {(32, 2, False), (128, 4, False)}


@pytest.mark.parametrize("calls", CALLS)
def test_calls_of_a_class_are_of_the_class_of_their_kernels(calls):
    """The option or window with which they are timed decides it."""
    for arguments in CALLS[calls]:
        options = Options(
            left=arguments["window"][0] if "window" in arguments else None,
            **{name: object() for name in arguments.get("option", "").split("+") if name},
        )
        assert (options.registers or "plain") == calls
