"""Backward over lists of key blocks: dQ over the lists, dK and dV over the inverted lists.

Formulas as in `backward`. Sums are in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.arguments import (
    aligned,
    blocks,
    constants,
    empty_in_layout,
    kernel_score,
    launch_tiles,
    mask_by_blocks,
    strided,
)
from ..rules.integers import value
from ..rules.mask import any_key, valid_keys, visible
from ..rules.product import add_weighted_rows, rows_by_rows
from ..rules.score import gradient, modified
from ..rules.score_gradient import QueryRows, load_lse, store_delta, tile_gradient
from ..rules.softmax import weights
from ..rules.tile import batch_row, load_vector
from .lists import (
    by_queries,
    inverted,
    list_head,
    list_keys,
    list_queries,
    list_tile,
    listed_pairs,
    lists_argument,
    load_rows_at,
    shape_of,
    store_rows_at,
    tile_of_lists,
)

if TYPE_CHECKING:
    from ...options import Options


@triton.jit(do_not_specialize=["H_q", "H_k", "T_q", "T_k"])
def selected_backward_dq_kernel(
    q, k, v, o, do, dq_out, lse_ptr, dlse_ptr, delta_ptr, mask, score, lists, H_q, H_k, T_q, T_k,
    const: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """dQ of a tile, and the rows' delta, which dK/dV reads. Grid and loop as in forward."""
    PRECISION: tl.constexpr = const.PRECISION
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = list_tile(H_q, H_k, T_q, T_k, mask, lists, shape, BLOCK_M, const.BLOCK_N)
    b, h, h_k, there = tile.row.b, tile.h, tile.h_k, tile.in_rows
    q = load_rows_at(q, b, h, tile.rows, there, BLOCK_D, const.D)
    do = load_rows_at(do, b, h, tile.rows, there, BLOCK_DV, const.D_V)
    o = load_rows_at(o, b, h, tile.rows, there, BLOCK_DV, const.D_V)
    delta = store_delta(o, do, dlse_ptr, delta_ptr, tile.statistics, there)
    rows = QueryRows(q, None, do, load_lse(lse_ptr + tile.statistics, there, score), delta)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(0, tile.steps):
        k_pos, valid, word = list_keys(i, tile, mask, shape, const.BLOCK_N)
        k_tile = load_rows_at(k, b, h_k, k_pos, valid, BLOCK_D, const.D)
        v_tile = load_rows_at(v, b, h_k, k_pos, valid, BLOCK_DV, const.D_V)
        across = k_pos[None, :]
        keep = visible(tile.rows[:, None], across, h[:, None], tile.row, mask, valid[None, :])
        keep = listed_pairs(keep, word, tile, shape)
        _, ds = tile_gradient(rows, k_tile, v_tile, None, None, 0, keep, tile, score, const)
        dq = add_weighted_rows(dq, ds, k_tile, PRECISION)
    dq *= score.scale
    store_rows_at(dq_out, b, h, tile.rows, dq, there, BLOCK_D, const.D)


@triton.jit(do_not_specialize=["H_q", "H_k", "T_q", "T_k"])
def selected_backward_dkv_kernel(
    q, k, v, do, dk_out, dv_out, lse_ptr, delta_ptr, mask, score, lists, H_q, H_k, T_q, T_k,
    const: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys of one block, over the lists that contain the block.

    1-D grid: tiles of a block, blocks, K/V heads, batch. Transposed: keys down, queries across.
    dk_out, dv_out: None = gradient not computed.
    """
    PRECISION: tl.constexpr = const.PRECISION
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    SLOTS: tl.constexpr = shape.HEADS * shape.BLOCK_Q
    TILES: tl.constexpr = (BLOCK_K + BLOCK_N - 1) // BLOCK_N
    key_blocks = tl.cdiv(T_k, BLOCK_K)
    pid = tl.program_id(0)
    block = (pid // TILES) % key_blocks
    h_k = (pid // (TILES * key_blocks)) % H_k
    b = pid // (TILES * key_blocks * H_k)
    row = batch_row(b, T_q, T_k, mask)
    column = (pid % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_pos = tl.where(column < BLOCK_K, block * BLOCK_K + column, T_k)
    valid = valid_keys(k_pos, row, mask)
    k = load_rows_at(k, b, h_k, k_pos, valid, BLOCK_D, const.D)
    v = load_rows_at(v, b, h_k, k_pos, valid, BLOCK_DV, const.D_V)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    groups = H_q // shape.HEADS
    last = tl.where(any_key(valid), (h_k + 1) * (groups // H_k), 0)
    for group in range(h_k * (groups // H_k), last):
        h_s = list_head(b, group, groups, lists)
        ends_ptr = lists.ends_ptr + h_s * (key_blocks + 1) + block
        start = tl.load(ends_ptr)
        named = tl.load(ends_ptr + 1) - start
        numbers_ptr = lists.numbers_ptr + h_s * value(lists.width) + start
        for i in range(0, tl.cdiv(named * SLOTS, const.BLOCK_M)):
            slot = i * const.BLOCK_M + tl.arange(0, const.BLOCK_M)
            entry = slot // SLOTS
            number = tl.load(numbers_ptr + entry, mask=entry < named, other=0)
            h, rows = list_queries(slot % SLOTS, number, group, shape)
            there = (entry < named) & (rows < T_q)
            q_tile = load_rows_at(q, b, h, rows, there, BLOCK_D, const.D)
            do_tile = load_rows_at(do, b, h, rows, there, BLOCK_DV, const.D_V)
            stats = (b * H_q + h).to(tl.int64) * T_q + rows
            lse = load_lse(lse_ptr + stats, there, score)
            delta = load_vector(delta_ptr + stats, there, 0.0)
            s = rows_by_rows(k, q_tile, PRECISION)  # [BLOCK_N, BLOCK_M]
            across, down, heads = rows[None, :], k_pos[:, None], h[None, :]
            x, factor, before, capped = modified(s, across, down, heads, row, score)
            keep = visible(across, down, heads, row, mask, valid[:, None])
            p = weights(x, lse[None, :], factor, keep)
            if dv_out is not None:
                dv = add_weighted_rows(dv, p, do_tile, PRECISION)
            if dk_out is not None:
                dx = p * (rows_by_rows(v, do_tile, PRECISION) - delta[None, :])
                _, ds = gradient(dx, before, capped, across, down, heads, row, keep, score)
                dk = add_weighted_rows(dk, ds, q_tile, PRECISION)
    in_keys = k_pos < T_k
    # Invisible keys of the tile were processed too.
    if dk_out is not None:
        dk = tl.where(valid[:, None], dk * score.scale, 0.0)
        store_rows_at(dk_out, b, h_k, k_pos, dk, in_keys, BLOCK_D, const.D)
    if dv_out is not None:
        dv = tl.where(valid[:, None], dv, 0.0)
        store_rows_at(dv_out, b, h_k, k_pos, dv, in_keys, BLOCK_DV, const.D_V)


def launch_selected_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    lists: Tensor, counts: Tensor, block: tuple[int, int], options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v; delta fp32 like lse.

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    other arguments as in `launch_selected_forward`, with its results.
    """
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    B, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    dq = empty_in_layout(q, H_q, T_q, D)
    dk, dv = empty_in_layout(k, H_k, T_k, D), empty_in_layout(v, H_k, T_k, D_v)
    delta = torch.empty_like(lse)
    rules = mask_by_blocks(options), kernel_score(options, q.dtype)
    sizes = H_q, H_k, T_q, T_k

    argument, shape, count = by_queries(lists, counts, block, q, k)
    tile = tile_of_lists("backward_dq", q, D_v, shape)
    programs = count * blocks(shape.rows, tile.BLOCK_M)
    operands = (*map(strided, (q, k, v, o, do, dq)), lse, dlse, delta)
    rest = (*rules, argument, *sizes, constants(tile, D, D_v, q.dtype), shape)
    launch_tiles(selected_backward_dq_kernel, programs, tile, *operands, *rest)
    shape = shape_of(lists, block, q, k)
    tile = tile_of_lists("backward_dkv", q, D_v, shape)
    key_blocks = blocks(T_k, block[1])
    if programs := B * H_k * key_blocks * blocks(block[1], tile.BLOCK_N):
        numbers, starts = inverted(lists, key_blocks)
        by_block = lists_argument(numbers, None, starts, lists.shape[2])
        for into in ((None, dv), (dk, None)) if tile.apart else ((dk, dv),):
            operands = (*map(strided, (q, k, v, do, *into)), lse, delta)
            rest = (*rules, by_block, *sizes, constants(tile, D, D_v, q.dtype), shape)
            launch_tiles(selected_backward_dkv_kernel, programs, tile, *operands, *rest)
    return dq, dk, dv, delta
