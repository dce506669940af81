"""Kernels before and after the one-pass backward.

The one-pass kernel has one program per tile of keys. It computes dK and dV in registers, and adds
each dS K to an fp32 sum of dQ by atomics, whose order, and so the last bits, differ from run to
run. It has five products instead of the seven of two passes, but the traffic of the sum. Before it,
`launch_start_dq` computes the rows' statistics and zeroes the sum; after it, `launch_finish_dq`
scales the sum into q's dtype and memory order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import block_dim, index_type, strides, tiles_of
from .launch.launches import Launch, cached_plan
from .launch.tiles import TileConfig
from .rules.integers import runtime_int
from .rules.mask import Mask
from .rules.operands import Head, head
from .rules.tile import (
    batch_row,
    clear_output,
    ends_of,
    first_slot,
    load_tile,
    load_vector,
    memory_rows,
    query_program,
    query_rows,
    store_tile,
)

if TYPE_CHECKING:
    from ..options import Options

# Rows of statistics are padded to tiles of this size, for the Hopper kernels.
STATS_ROWS = 128
# Elements of a tile that fits the registers of a program twice.
_ELEMENTS = 128 * 128
_WARPS = 16


@triton.jit(do_not_specialize=["sum_rows", "H_q", "T_q"])
def start_dq_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, sum_ptr, minus_lse_ptr, minus_delta_ptr,
    o_strides, do_strides, mask, scale, sum_rows, H_q, T_q,
    D: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o * do) - dlse of a tile of queries, and zeros in their sum of dQ, if given.

    Grid as forward with G = 1. sum: fp32 [B, H_q, sum_rows, D] or None; delta, lse, dlse: fp32
    [B, H_q, T_q]. minus_lse = -lse / scale and minus_delta = -delta, [B, H_q, sum_rows], are the
    initial accumulators of the Hopper kernels: -inf for a row without keys. With them, rows are
    padded to whole tiles, with -inf and 0. Packed sequences have separate tiles, in their slots
    (`tile.sequence_of`).
    """
    tile, b, h, _ = query_program(T_q, H_q, 1, mask, ROWS)
    row = batch_row(b, T_q, T_q, mask)
    batch, first_q, _ = memory_rows(b, T_q, T_q, mask)
    m_first, _, rows, in_rows = query_rows(tile, row.T_q, ROWS)
    o = head(o_ptr, batch, h, first_q, o_strides, INDEX)
    do = head(do_ptr, batch, h, first_q, do_strides, INDEX)
    o = load_tile(o, m_first, in_rows, ROWS, BLOCK_DV, D_V)
    do = load_tile(do, m_first, in_rows, ROWS, BLOCK_DV, D_V)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    first = (batch * H_q + h).to(tl.int64) * T_q + first_q
    if dlse_ptr is not None:
        delta -= load_vector(dlse_ptr + first + rows, in_rows, 0.0)
    if delta_ptr is not None:
        tl.store(delta_ptr + first + rows, delta, mask=in_rows)
    sum_row = (batch * H_q + h).to(tl.int64) * sum_rows + first_slot(b, first_q, mask, ROWS)
    if minus_lse_ptr is not None:
        lse = load_vector(lse_ptr + first + rows, in_rows, float("inf"))
        # The weights of rows without keys and of nonexistent rows are 0.
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        # An empty slot of a sequence is unused, or the next sequence's.
        there = m_first < row.T_q
        tl.store(minus_lse_ptr + sum_row + rows, -lse / scale, mask=there)
        tl.store(minus_delta_ptr + sum_row + rows, -delta, mask=there)
        in_rows = in_rows | there
    if sum_ptr is not None:
        zeros = tl.zeros([ROWS, BLOCK_D], tl.float32)
        store_tile(Head(sum_ptr + sum_row * D, D), m_first, zeros, in_rows, ROWS, BLOCK_D, D)


@triton.jit(do_not_specialize=["parts", "sum_rows", "H_q", "T_q"])
def finish_dq_kernel(
    sum_ptr, dq_ptr, dq_strides, mask, scale, parts, sum_rows, H_q, T_q,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """dq = scale * sum for a tile of rows; grid and sum as in `start_dq_kernel`.

    parts: number of sums per head, added in order.
    """
    tile, b, h, _ = query_program(T_q, H_q, 1, mask, ROWS)
    row = batch_row(b, T_q, T_q, mask)
    batch, first_q, _ = memory_rows(b, T_q, T_q, mask)
    m_first, _, _, in_rows = query_rows(tile, row.T_q, ROWS)
    first = first_slot(b, first_q, mask, ROWS)
    head_of_sum = (batch * H_q + h).to(tl.int64) * parts
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(0, parts):
        part_ptr = sum_ptr + ((head_of_sum + part) * sum_rows + first) * D
        dq += load_tile(Head(part_ptr, D), m_first, in_rows, ROWS, BLOCK_D, D)
    ends = ends_of(mask.cu_q_ptr, mask, T_q)
    clear_output(dq_ptr, dq_strides, tl.arange(0, BLOCK_D), D, H_q, ends)
    rows = head(dq_ptr, batch, h, first_q, dq_strides, INDEX)
    store_tile(rows, m_first, dq * scale, in_rows, ROWS, BLOCK_D, D)


def _rows(*dims: int) -> int:
    """Rows of a tile with this many columns."""
    return min(STATS_ROWS, _ELEMENTS // max(dims))


def _mask(cu_seqlens: Tensor | None) -> Mask:
    """Mask that separates the rows of packed sequences, if cu_seqlens is given."""
    if cu_seqlens is None:
        return Mask()
    sequences = runtime_int(cu_seqlens.shape[0] - 1)
    return Mask(cu_q_ptr=cu_seqlens, cu_k_ptr=cu_seqlens, sequences=sequences)


@cached_plan(3)
def _plan_start(
    options: Options,
    o: Tensor,
    do: Tensor,
    total: Tensor | None,
    dlse: Tensor | None,
    stats: Tensor | None,
) -> Launch:
    B, H_q, T_q, D_v = o.shape
    D = D_v if total is None else total.shape[3]
    dims = (block_dim(D), block_dim(D_v))
    rows = _rows(*dims) if stats is None else STATS_ROWS
    # Rows in plain layout do not depend on sequences.
    cu_seqlens = None if stats is None else options.cu_seqlens_q
    return Launch(
        start_dq_kernel,
        tiles_of(cu_seqlens, B, T_q, rows) * H_q,
        TileConfig(rows, rows, _WARPS),
        strides(o),
        strides(do),
        _mask(cu_seqlens),
        options.scale,
        T_q if stats is None else stats.shape[2],
        H_q,
        T_q,
        D,
        D_v,
        rows,
        *dims,
        index_type(o, do),
    )


def launch_start_dq(
    do: Tensor, dlse: Tensor | None, q: Tensor, o: Tensor, lse: Tensor, delta: Tensor | None,
    options: Options, stats: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A zero fp32 sum of dQ [B, H_q, rows, D]; fills delta, like lse, if given.

    do and o [B, H_q, T_q, D_v] as `arguments.aligned` leaves them.

    stats: fp32 [2, B * H_q, rows] contiguous, to be filled with -lse / scale and -delta. Then a
    head's rows, here and in the sum, are whole tiles of STATS_ROWS, for packed sequences T_q //
    STATS_ROWS + N tiles. Without it, rows = T_q.
    """
    B, H_q, T_q, D = q.shape
    rows = T_q if stats is None else stats.shape[2]
    total = q.new_empty(B, H_q, rows, D, dtype=torch.float32)
    launch_delta(do, dlse, o, lse, delta, options, stats, total)
    return total


def launch_delta(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, delta: Tensor | None,
    options: Options, stats: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill delta, stats and total, each if given, as `launch_start_dq` does."""
    minus_lse, minus_delta = (None, None) if stats is None else (stats[0], stats[1])
    launch = _plan_start(options, o, do, total, dlse, stats)
    launch(options, o, do, lse, dlse, delta, total, minus_lse, minus_delta)


@cached_plan(2)
def _plan_finish(options: Options, x: Tensor, sums: Tensor, in_tiles: bool, scaled: bool) -> Launch:
    B, H, T, D = x.shape
    cu_seqlens = options.cu_seqlens_q if in_tiles else None
    rows = _rows(block_dim(D))
    if cu_seqlens is None:
        rows //= 2  # a tile and its addend fit the registers
    return Launch(
        finish_dq_kernel,
        tiles_of(cu_seqlens, B, T, rows) * H,
        TileConfig(rows, rows, _WARPS),
        strides(x),
        _mask(cu_seqlens),
        options.scale if scaled else 1.0,
        sums.shape[1] // H,
        sums.shape[2],
        H,
        T,
        D,
        rows,
        block_dim(D),
        index_type(x),
    )


def launch_finish_dq(total: Tensor, dq: Tensor, options: Options) -> None:
    """dq [B, H_q, T_q, D], in any memory order, from the sum of `launch_start_dq`."""
    launch = _plan_finish(options, dq, total, total.shape[2] != dq.shape[2], True)
    launch(options, total, dq)


def parts_of(x: Tensor, parts: int) -> Tensor:
    """Empty fp32 [B, H * parts, T, D] for the parts of x [B, H, T, D]: see `launch_add_parts`."""
    B, H, T, D = x.shape
    return x.new_empty(B, H * parts, T, D, dtype=torch.float32)


def launch_add_parts(sums: Tensor, x: Tensor, options: Options) -> None:
    """Write x [B, H, T, D], in any memory order: the parts in sums, fp32 [B, H * parts, T, D]
    contiguous, added in order.
    """
    _plan_finish(options, x, sums, False, False)(options, sums, x)
