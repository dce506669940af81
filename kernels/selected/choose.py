"""Scores of key blocks for selection: sums of weights or largest scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import tiles
from ..launch.arguments import aligned, block_dim, blocks, constants, launch_tiles, strides
from ..rules.integers import runtime_int
from ..rules.operands import head_at
from ..rules.product import rows_by_rows
from ..rules.softmax import LOG2E, weights
from ..rules.tile import load_block, load_vector


@triton.jit(do_not_specialize=["H_q", "H_k", "H_s", "T_q", "T_k", "first_query", "rows", "wide"])
def block_scores_kernel(
    q_ptr, k_ptr, lse_ptr, scores_ptr, strides, scale, H_q, H_k, H_s, T_q, T_k, first_query, offset,
    rows, wide, const: tl.constexpr, POOL: tl.constexpr, STRIDE: tl.constexpr,
    PER_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N / PER_BLOCK] of a tile of queries and blocks, over the heads that
    share a list. 1-D grid: tiles of blocks, of queries, lists, batch.

    lse_ptr: of the queries over these keys: the score is the sum of weights; None: the largest
    score. Key i pools the tokens from i STRIDE to i STRIDE + POOL - 1. A block of PER_BLOCK STRIDE
    tokens includes the keys that begin in it and, once for each STRIDE of overlap, earlier keys. A
    block without visible keys scores -inf. rows: number of queries, from first_query on; wide:
    blocks. strides: of q and of k. offset: in a tuple, position of query 0.
    """
    PRECISION: tl.constexpr = const.PRECISION
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    pid = tl.program_id(0)
    across = tl.cdiv(wide, BLOCKS)
    down = tl.cdiv(rows, BLOCK_M)
    tile = pid % across
    m_first = first_query + (pid // across) % down * BLOCK_M
    s_head = (pid // (across * down)) % H_s
    b = pid // (across * down * H_s)
    query = m_first + tl.arange(0, BLOCK_M)
    in_rows = query < first_query + rows
    position = query + (offset[0] >> 2)
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    first_key = tile * BLOCKS * PER_BLOCK
    # A tile that begins after the last query is hidden.
    last = (H_q // H_s) * (s_head + 1)
    if CAUSAL:
        last = tl.where(first_key * STRIDE <= m_first + BLOCK_M + (offset[0] >> 2), last, 0)
    for h in range(H_q // H_s * s_head, last):
        q_head = head_at(q_ptr, b, h, 0, strides[0], const)
        q = load_block(q_head, m_first, in_rows, BLOCK_M, const.BLOCK_D, const.D)
        k_head = head_at(k_ptr, b, h * H_k // H_q, 0, strides[1], const)
        for back in range(0, POOL // STRIDE):
            key = first_key - back + tl.arange(0, BLOCK_N)
            there = (key >= 0) & (key < T_k)
            first = first_key - back
            k = load_block(k_head, first, there, BLOCK_N, const.BLOCK_D, const.D)
            s = rows_by_rows(q, k, PRECISION)
            keep = there[None, :] & in_rows[:, None]
            if CAUSAL:
                keep = keep & ((key * STRIDE + POOL - 1)[None, :] <= position[:, None])
            if lse_ptr is not None:
                index = (b * H_q + h).to(tl.int64) * T_q + query
                lse = load_vector(lse_ptr + index, in_rows, float("inf"))
                p = weights(s, lse[:, None], scale * LOG2E, keep)
                best = tl.where(keep, tl.maximum(best, 0.0) + p, best)
            else:
                best = tl.maximum(best, tl.where(keep, s * scale, float("-inf")))
    of_blocks = best.reshape(BLOCK_M, BLOCKS, PER_BLOCK)
    score = tl.max(of_blocks, 2)
    if lse_ptr is not None:
        total = tl.sum(tl.maximum(of_blocks, 0.0), 2)
        score = tl.where(score == float("-inf"), score, total)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    row = ((b * H_s + s_head).to(tl.int64) * rows + query - first_query) * wide
    inside = in_rows[:, None] & (block < wide)[None, :]
    tl.store(scores_ptr + row[:, None] + block[None, :], score, mask=inside)


def launch_block_scores(
    q: Tensor, k: Tensor, lse: Tensor | None, H_s: int, per_block: int, pool: tuple[int, int],
    count: int, rows: tuple[int, int], offset: int, scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """fp32 [B, H_s, rows, count]: scores of `count` blocks for queries rows[0] up to rows[1] - 1.

    q [B, H_q, T_q, D] and k [B, H_k, T_k, D] as in `launch_forward`; lse fp32 [B, H_q, T_q]
    contiguous or None. H_s: divides H_q. pool: tokens of a key, and their stride. per_block: keys
    that begin in a block, a power of two up to 128. offset: position of query 0.
    """
    q, k = aligned(q), aligned(k)
    B, H_q, T_q, D = q.shape
    H_k, T_k = k.shape[1:3]
    length = rows[1] - rows[0]
    scores = q.new_empty(B, H_s, length, count, dtype=torch.float32)
    tile = tiles.lookup("backward_dq", q.element_size(), block_dim(D), "scores")
    const = constants(tile, D, D, q.dtype, q, k)
    const = const._replace(BLOCK_N=max(const.BLOCK_N, per_block))
    across = blocks(count, const.BLOCK_N // per_block)
    programs = B * H_s * across * blocks(length, const.BLOCK_M)
    operands = (q, k, lse, scores, (strides(q), strides(k)), scale, H_q, H_k, H_s, T_q, T_k)
    of_rows = (rows[0], (runtime_int(offset),), length, count)
    how = (const, *pool, per_block, causal)
    launch_tiles(block_scores_kernel, programs, tile, *operands, *of_rows, *how)
    return scores
