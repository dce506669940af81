"""Forward over lists of key blocks: one program per tile of queries that share a list."""

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
from ..rules.mask import visible
from ..rules.product import add_weighted_rows, rows_by_rows
from ..rules.score import first_state, modified
from ..rules.softmax import finish, online_step
from .lists import (
    by_queries,
    list_keys,
    list_tile,
    listed_pairs,
    load_rows_at,
    store_rows_at,
    tile_of_lists,
)

if TYPE_CHECKING:
    from ...options import Options


@triton.jit(do_not_specialize=["H_q", "H_k", "T_q", "T_k"])
def selected_forward_kernel(
    q, k, v, o_out, lse_ptr, mask, score, lists, H_q, H_k, T_q, T_k, const: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """o and lse of a tile of queries that share a list: see `lists.list_tile`."""
    PRECISION: tl.constexpr = const.PRECISION
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = list_tile(H_q, H_k, T_q, T_k, mask, lists, shape, BLOCK_M, BLOCK_N)
    row, b, h = tile.row, tile.row.b, tile.h
    q = load_rows_at(q, b, h, tile.rows, tile.in_rows, BLOCK_D, const.D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m, l = first_state(h, m, l, score)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in range(0, tile.steps):
        k_pos, valid, word = list_keys(i, tile, mask, shape, BLOCK_N)
        k_tile = load_rows_at(k, b, tile.h_k, k_pos, valid, BLOCK_D, const.D)
        s = rows_by_rows(q, k_tile, PRECISION)
        s, factor, _, _ = modified(s, tile.rows[:, None], k_pos[None, :], h[:, None], row, score)
        keep = visible(tile.rows[:, None], k_pos[None, :], h[:, None], row, mask, valid[None, :])
        keep = listed_pairs(keep, word, tile, shape)
        p, rescale, m, l = online_step(tl.where(keep, s, float("-inf")), m, l, factor, True)
        v_tile = load_rows_at(v, b, tile.h_k, k_pos, valid, BLOCK_DV, const.D_V)
        acc = add_weighted_rows(acc * rescale[:, None], p, v_tile, PRECISION)
    o, lse = finish(acc, m, l)
    store_rows_at(o_out, b, h, tile.rows, o, tile.in_rows, BLOCK_DV, const.D_V)
    tl.store(lse_ptr + tile.statistics, lse, mask=tile.in_rows)


def launch_selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    counts: Tensor,
    block: tuple[int, int],
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's dtype and memory order, lse fp32 [B, H_q, T_q].

    q, k, v as in `launch_forward`. lists: int32 [B, H_s, R, n], for each block of block[0] queries
    the distinct numbers of its blocks of block[1] keys, padded with T_k's number of blocks. counts:
    int32 [B, H_s, R]. Options: masks by position, lengths, padding and documents, scale, softcap
    and sinks.
    """
    q, k, v = aligned(q), aligned(k), aligned(v)
    _, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    o = empty_in_layout(q, H_q, T_q, D_v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    argument, shape, count = by_queries(lists, counts, block, q, k)
    tile = tile_of_lists("forward", q, D_v, shape)
    programs = count * blocks(shape.rows, tile.BLOCK_M)
    operands = (*map(strided, (q, k, v, o)), lse)
    given = (mask_by_blocks(options), kernel_score(options, q.dtype), argument, H_q, H_k, T_q, T_k)
    const = constants(tile, D, D_v, q.dtype)
    launch_tiles(selected_forward_kernel, programs, tile, *operands, *given, const, shape)
    return o, lse
