"""Gradient of attn_bias, summed over broadcast dims.

One program per tile of the bias. It visits the score tiles to which its bias tile was added, in a
fixed order, recomputes their gradients and sums them in registers: deterministic, without a [B,
H_q, T_q, T_k] tensor for a smaller bias.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import (
    aligned,
    bias_stream,
    block_dim,
    blocks,
    constants,
    kernel_mask,
    rules,
    strides,
    tile_for,
)
from .launch.launches import Launch
from .rules.blocks import key_head, load_queries, meeting_keys, query_tile_at
from .rules.mask import any_key, valid_keys, visible
from .rules.plans import key_blocks
from .rules.relative import relative_query, vectors_of_tile
from .rules.score import load_bias
from .rules.score_gradient import QueryRows, load_lse, tile_gradient
from .rules.tile import load_tile, load_vector

if TYPE_CHECKING:
    from ..options import Options

_Strides = namedtuple("_Strides", "q k v do")


@triton.jit(
    do_not_specialize=[
        "H_q",
        "G",
        "T_q",
        "T_k",
        "bias_heads",
        "bias_tiles_q",
        "bias_tiles_k",
        "sum_batch",
        "sum_heads",
        "sum_tiles_q",
        "sum_tiles_k",
        "bias_T_q",
        "bias_T_k",
    ]
)
def attention_backward_bias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dbias_ptr, bias_desc, strides, mask, score,
    H_q, G, T_q, T_k, bias_heads, bias_tiles_q, bias_tiles_k, bias_T_q, bias_T_k,
    sum_batch, sum_heads, sum_tiles_q, sum_tiles_k, const: tl.constexpr,
):  # fmt: skip
    """bias_*: the grid of bias tiles; sum_*: the grid of score tiles for each."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    pid = tl.program_id(0)
    bias_n = pid % bias_tiles_k
    bias_m = pid // bias_tiles_k % bias_tiles_q
    bias_row = pid // (bias_tiles_k * bias_tiles_q)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(0, sum_batch * sum_heads * sum_tiles_q * sum_tiles_k):
        # Each index comes from the bias's grid or the sum's; the other is 0.
        n_tile = bias_n + i % sum_tiles_k
        m_tile = bias_m + i // sum_tiles_k % sum_tiles_q
        h_q = bias_row % bias_heads + i // (sum_tiles_k * sum_tiles_q) % sum_heads
        b = bias_row // bias_heads + i // (sum_tiles_k * sum_tiles_q * sum_heads)
        tile = query_tile_at(m_tile, b, h_q, h_q // G, H_q, T_q, T_k, mask, BLOCK_M)
        lo, _full_lo, _full_hi, hi, first_blocks = key_blocks(
            tile.first, tile.last, tile.row, mask, BLOCK_N
        )
        n_first = n_tile * BLOCK_N
        tile = meeting_keys(tile, n_first, mask)
        row = tile.row
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        in_range = ((n_tile >= lo) & (n_tile < hi)) | (n_tile < first_blocks)
        if in_range & any_key(valid):
            k = key_head(k_ptr, strides.k, tile, const)
            v = key_head(v_ptr, strides.v, tile, const)
            q = load_queries(q_ptr, strides.q, tile, const.BLOCK_D, const.D, const)
            query = relative_query(q, b, h_q, 0, tile.first, tile.in_rows, score, const)
            vectors = None
            if score.keys_ptr is not None:
                vectors = vectors_of_tile(tile.first, n_first, h_q, H_q, row, score, const)
            stats = tile.statistics + tile.rows
            queries = QueryRows(
                q,
                query,
                load_queries(do_ptr, strides.do, tile, const.BLOCK_DV, const.D_V, const),
                load_lse(lse_ptr + stats, tile.in_rows, score),
                load_vector(delta_ptr + stats, tile.in_rows, 0.0),
            )
            k = load_tile(k, n_first, valid, BLOCK_N, const.BLOCK_D, const.D)
            v = load_tile(v, n_first, valid, BLOCK_N, const.BLOCK_DV, const.D_V)
            keep = visible(tile.rows[:, None], k_pos[None, :], h_q, row, mask, valid[None, :])
            bias = None
            if bias_desc is not None:
                bias = load_bias(bias_desc, b, h_q, tile.first, n_first, score, const)
            dbias, _ds = tile_gradient(
                queries, k, v, vectors, bias, n_first, keep, tile, score, const
            )
            total += dbias
    # A bias of one row or one key, broadcast or not, has its sum at index 0 of the tile.
    if bias_T_q == 1:
        total = tl.broadcast_to(tl.sum(total, 0)[None, :], [BLOCK_M, BLOCK_N])
    if bias_T_k == 1:
        total = tl.broadcast_to(tl.sum(total, 1)[:, None], [BLOCK_M, BLOCK_N])
    m_pos = bias_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_pos = bias_n * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = (bias_row.to(tl.int64) * bias_T_q + m_pos)[:, None] * bias_T_k + n_pos[None, :]
    inside = (m_pos < bias_T_q)[:, None] & (n_pos < bias_T_k)[None, :]
    tl.store(dbias_ptr + pointers, total, mask=inside)


def launch_backward_bias(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> Tensor:
    """fp32, contiguous, in the shape of options.attn_bias.

    lse and delta: as for the other backward kernels.
    """
    assert options.attn_bias is not None
    q, k, v, do = aligned(q), aligned(k), aligned(v), aligned(do)
    B, H_q, T_q, D = q.shape
    T_k, D_v = v.shape[2:]
    shape = options.attn_bias.shape
    dbias = q.new_empty(shape, dtype=torch.float32)
    dims = block_dim(D), block_dim(D_v)
    tile = tile_for("backward_dq", options, q, *dims, streams_bias=True)
    tiles = (B, H_q, blocks(T_q, tile.BLOCK_M), blocks(T_k, tile.BLOCK_N))
    own = tuple(1 if size == 1 else count for size, count in zip(shape, tiles, strict=True))
    sums = tuple(count if size == 1 else 1 for size, count in zip(shape, tiles, strict=True))
    programs = own[0] * own[1] * own[2] * own[3]
    if dbias.numel() == 0:
        return dbias
    if min(sums) == 0:
        return dbias.zero_()
    Launch(
        attention_backward_bias_kernel,
        programs,
        tile,
        _Strides(*map(strides, (q, k, v, do))),
        *rules(options, kernel_mask(options), q, k),
        *own[1:],
        *shape[2:],
        *sums,
        constants(tile, D, D_v, q.dtype, q, k, v, do, options.relative_query),
        streams=(bias_stream(options, q, tile),),
    )(options, q, k, v, do, lse, delta, dbias)
    return dbias
