"""Candidates: tiles of the portable kernels and shapes of the Hopper kernels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...kernels.hopper import tile_table
from ...kernels.hopper.tile_table import HopperConfig
from ...kernels.launch import tiles
from ...kernels.launch.tiles import HOPPER_FORWARD, TileConfig
from ..cases.case import Case, Direction, plain

# Classes of calls with their own tiles: arguments of `Case`, causal and not.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "masked": ({"window": (1023, 0)}, {"window": (511, 512)}),
    "bias": ({"option": "attn_bias"}, {"option": "attn_bias"}),
    "scores": ({"option": "relative_bias"}, {"option": "relative_bias"}),
    "heavy": ({"option": "attn_bias+relative_bias"}, {"option": "attn_bias+relative_bias"}),
}
NEW_TOKENS = {"decode": 1, "decode_chunk": 64}
# Kernels whose programs hold a block of keys and loop over the queries.
BY_KEYS = ("backward_dkv", "backward_one_pass")
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
TMA = ("sm_90", "sm_100")
TOKENS = 4096  # of a sequence; 16384 in a call
_MOST = 24  # candidates per entry, each with both kinds of loads
# BLOCK_M, rows of a query tile. For a new token, rows are the query heads on one key head.
_ROWS = {
    "forward": (64, 128),
    "backward_one_pass": (16, 32, 64),
    "decode": (16,),
    "decode_chunk": (16, 32, 64),
}
# Shared memory of a program on Hopper, without barriers.
_HOPPER_BYTES = 226 * 1024
_CONSUMER_ROWS = 64
# Most scores per thread with FFMA products: more operands would not fit its registers.
_FFMA_SCORES = 8
# With so many rows, Triton 3.7 computes IEEE products as TF32 in tensor memory.
_TENSOR_ROWS = 64


class Shape(NamedTuple):
    """A model's attention: head dim, query heads, key/value heads and dtype."""

    D: int
    H_q: int
    H_k: int
    dtype: str = "bfloat16"

    @property
    def BLOCK_D(self) -> int:
        """Columns of the table entry for this head dim."""
        return next((D for D in (64, 128) if self.D <= D), 256)


def usual_shape(D: int, dtype: str = "bfloat16") -> Shape:
    """Hidden size 2048, all heads with own keys and values."""
    return Shape(D, 2048 // D, 2048 // D, dtype)


@dataclass(frozen=True)
class TableEntry:
    """Key of a tuning table's entry: kernel, element size, padded head dim, calls.

    calls: one of CALLS.
    """

    kernel: str
    element_size: int
    BLOCK_D: int
    calls: str = "plain"

    @property
    def key(self) -> dict[str, Any]:
        """The key of a stored finding."""
        sizes = {"element_size": self.element_size, "BLOCK_D": self.BLOCK_D}
        return {"kernel": self.kernel, "calls": self.calls, **sizes}

    def shipped(self, arch: str) -> TileConfig:
        """The shipped tile for an architecture."""
        kind = self.kernel if self.calls == "plain" else f"{self.kernel}_{self.calls}"
        return tiles.tile_of(arch, kind, self.element_size, self.BLOCK_D)

    def cases(self, shape: Shape) -> tuple[Case, ...]:
        """A causal case of a shape and one without a mask; decoding is causal, with full caches."""
        D, H_q, H_k, dtype = shape
        if self.kernel in NEW_TOKENS:
            tokens = NEW_TOKENS[self.kernel]
            one = Case("decode", "forward", 16, H_q, H_k, tokens, TOKENS, D, causal=True)
            return (replace(one, dtype=dtype, layout="bhtd"),)
        direction: Direction = "forward" if self.kernel == "forward" else "backward"
        both = (
            plain(direction, 16384 // TOKENS, H_q, H_k, TOKENS, D, causal)
            for causal in (True, False)
        )
        of_class = zip(both, CALLS[self.calls], strict=True)
        return tuple(replace(call, dtype=dtype, **arguments) for call, arguments in of_class)


def candidates(entry: TableEntry, shared_bytes: int, arch: str) -> list[TileConfig]:
    """Tiles to compile for an entry, the largest first.

    Excludes tiles whose accumulators fill the registers, whose operands exceed `shared_bytes`,
    whose warps have no rows, or that lose fp32 precision. All tiles sum in as many parts as the
    tile in use. Variants: forward with pointer loads and, on GPUs with TMA, with descriptors
    (always with a bias); dK and dV of many columns in one launch or two; on AMD matrix instructions
    of 32 or 16 rows.
    """
    usual = entry.shipped(arch)
    by_ffma = _by_ffma(entry, arch)
    sides = (16, 32, 64) if by_ffma else (32, 64, 128)
    rows = (32, 64) if by_ffma and entry.kernel == "forward" else _ROWS.get(entry.kernel, sides)
    stages = (1, 2) if entry.kernel == "backward_one_pass" else (1, 2, 3)
    apart = (False, True) if entry.kernel == "backward_dkv" and entry.BLOCK_D > 128 else (False,)
    sizes = [
        TileConfig(*numbers, sum_parts=usual.sum_parts, apart=each)
        for numbers in itertools.product(rows, sides, (4, 8), stages)
        for each in apart
    ]
    fitting = [t for t in sizes if _plausible(entry, t, shared_bytes, arch)]
    fitting.sort(key=lambda t: (-t.BLOCK_M * t.BLOCK_N, abs(t.num_stages - 2)))
    if arch.startswith("gfx"):
        return [made for tile in fitting[:_MOST] for made in _of_amd(entry, tile)]
    loads = (False, True) if arch in TMA and entry.kernel == "forward" else (False,)
    if entry.calls == "bias":
        loads = (True,)
    return [replace(tile, descriptors=load) for tile in fitting[:_MOST] for load in loads]


def _of_amd(entry: TableEntry, tile: TileConfig) -> list[TileConfig]:
    """Two waves share a SIMD, so that products and vector instructions overlap."""
    held = tile.BLOCK_N if entry.kernel in BY_KEYS else tile.BLOCK_M
    rows = (0, 16) if held >= 32 * tile.num_warps else (16,)
    return [replace(tile, waves_per_eu=2, matrix_instr_nonkdim=n) for n in rows]


def _by_ffma(entry: TableEntry, arch: str) -> bool:
    """Whether products have no matrix unit: IEEE fp32 on NVIDIA GPUs."""
    return entry.element_size == 4 and arch.startswith("sm_")


def _plausible(entry: TableEntry, tile: TileConfig, shared_bytes: int, arch: str) -> bool:
    D, threads, scores = entry.BLOCK_D, 32 * tile.num_warps, tile.BLOCK_M * tile.BLOCK_N
    if _by_ffma(entry, arch):
        longest = max(tile.BLOCK_M, tile.BLOCK_N)
        tensor_memory = arch.startswith("sm_10") and longest >= _TENSOR_ROWS
        if tensor_memory or scores > _FFMA_SCORES * threads:
            return False
    backward = entry.kernel.startswith("backward")
    by_keys = entry.kernel in BY_KEYS
    held, streamed = (tile.BLOCK_N, tile.BLOCK_M) if by_keys else (tile.BLOCK_M, tile.BLOCK_N)
    kept = 2 if by_keys and not tile.apart else 1
    accumulators = held * D * kept + scores * (1 + backward)
    most = 224
    if entry.kernel == "backward_one_pass":
        accumulators += streamed * D
        most = 192  # this kernel has the most pointers
    # wgmma has 64 rows for four warps, v_mfma 16 or 32 per warp: other warps would be redundant.
    least = {"sm_90": 64, "gfx942": 32}.get(arch, held + 1)
    if least <= held < 16 * tile.num_warps:
        return False
    operands = held * D * (2 if backward else 1) + tile.num_stages * 2 * streamed * D
    return accumulators / threads <= most and operands * entry.element_size <= shared_bytes


def hopper_shipped(kernel: str, D: int) -> HopperConfig | None:
    """The shape of one of `tiles.HOPPER` in plain calls, or None without this head dim."""
    if D not in tile_table.HEAD_DIMS:
        return None
    if kernel == "hopper_fp8":
        return tile_table.fp8_config(D, False)
    if kernel in HOPPER_FORWARD:
        return tile_table.forward_config(D, False)
    if D == tile_table.APART_HEAD_DIM:  # shared memory allows one shape only
        return None
    return tile_table.backward_config(kernel.removeprefix("hopper_"), D, False, False)


def hopper_candidates(kernel: str, D: int) -> list[HopperConfig]:
    """Other shapes: blocks, stages, and for forward consumers in turns or three consumers.

    The backward kernels have two consumers. One pass adds dQ by TMA or by the threads. 16-bit
    forward in the shape in use also has variants that rescale in every block, since the faster
    choice depends on the scores, and that store weights the other way.
    """
    usual = hopper_shipped(kernel, D)
    if usual is None:
        return []
    forward = kernel in HOPPER_FORWARD
    turns = (False, True) if forward else (False,)
    by_tma = (True, False) if kernel == "hopper_one_pass" else (True,)
    made = [
        usual._replace(BLOCK=block, STAGES=stages, PING_PONG=turn, DQ_BY_TMA=tma)
        for block, stages, turn, tma in itertools.product((32, 64, 128), (2, 4), turns, by_tma)
    ]
    # Three consumers share the registers of two, which larger blocks would fill.
    made += [
        config._replace(CONSUMERS=3, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=24)
        for config in made
        if forward and config.BLOCK == 64 and D <= 128
    ]
    if kernel == "hopper_forward":
        made.append(usual._replace(WIDE_WEIGHTS=not usual.WIDE_WEIGHTS))
        made.append(usual._replace(SLACK=0))
    return [config for config in made if config != usual and _fits(kernel, config)]


def _fits(kernel: str, config: HopperConfig) -> bool:
    """Whether the tiles fit shared memory, and products of one pass have 64 queries.

    In 8 bits with 16-bit output, blocks have at least 64 keys.
    """
    held = (4 if config.CONSUMERS == 3 else config.CONSUMERS) * _CONSUMER_ROWS * config.D
    rings = 2 * config.STAGES * config.BLOCK * config.D
    if kernel == "hopper_one_pass":
        # K and V; two tiles of dS per consumer; in fp32 lse and delta per stage, and dQ if TMA adds
        # it.
        exchange = 2 * config.CONSUMERS * _CONSUMER_ROWS * config.BLOCK
        fp32 = 2 * config.STAGES * config.BLOCK + config.DQ_BY_TMA * config.BLOCK * config.D
        all_bytes = 2 * (2 * held + exchange + rings) + 4 * fp32
        return config.BLOCK >= 64 and all_bytes <= _HOPPER_BYTES
    if kernel == "hopper_fp8":
        return config.BLOCK >= 64 and 3 * held + rings <= _HOPPER_BYTES
    copies = (1 if kernel == "hopper_forward" else 2) + config.APART
    return 2 * (copies * held + rings) <= _HOPPER_BYTES


def names_of(tile: TileConfig | HopperConfig) -> str:
    """A tile or shape in a few words: its sizes and values other than the defaults."""
    if isinstance(tile, TileConfig):
        parts = [tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, tile.num_stages]
        words = [name for name in ("descriptors", "apart") if getattr(tile, name)]
        words += [f"{tile.waves_per_eu} waves"] * (tile.waves_per_eu > 0)
        words += [f"products of {tile.matrix_instr_nonkdim} rows"] * (tile.matrix_instr_nonkdim > 0)
    else:
        parts = [tile.BLOCK, tile.STAGES]
        words = ["turns"] * tile.PING_PONG + ["3 consumers"] * (tile.CONSUMERS == 3)
        words += ["fp32 weights"] * tile.WIDE_WEIGHTS
        words += ["threads add"] * (not tile.DQ_BY_TMA) + ["no slack"] * (not tile.SLACK)
    return f"({', '.join(map(str, [*parts, *words]))})"
