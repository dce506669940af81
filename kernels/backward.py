"""Backward: one program a tile of queries for dQ, one a tile of keys for dK and dV.

With p = softmax weights, do the gradient of o and dlse that of lse (Dao et al. 2022, appendix B.4):

    dv = p^T do          dp = do v^T          delta = rowsum(o * do) - dlse
    ds = p * (dp - delta)          dq = scale * ds k          dk = scale * ds^T q

p is computed again from lse; with dropout, dv takes the weights that survived and dp is dropped
like them. The G query heads of a K/V head are met in a loop by one program, so dK and dV are summed
in registers and never expanded. These two passes are deterministic. Where it is permitted, one pass
computes all three: the programs of keys add up dQ by atomics, see `backward_atomic`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_atomic import launch_finish_dq, launch_start_dq
from .launch.arguments import (
    aligned,
    block_dim,
    constants,
    empty_in_layout,
    kernel_score,
    key_programs,
    query_programs,
    sizes,
    strides,
    tile_for,
)
from .launch.block_sparsity import launch_mask
from .launch.launches import Launch, launch_for
from .rules.blocks import (
    key_head,
    key_tile,
    load_keys,
    load_queries,
    over_key_blocks,
    over_query_blocks,
    query_tile,
    store_keys,
    store_queries,
)
from .rules.mask import any_key
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import relative_products, relative_query, unskewed, vectors_of_tile
from .rules.score import dropped, gradient, kept, modified
from .rules.score_gradient import Rows, load_lse, store_delta, tile_gradient
from .rules.softmax import weights
from .rules.tile import add_tile, head_at, load_tile, load_vector

if TYPE_CHECKING:
    from fastattn.options import Options


@triton.jit
def _grow_dq(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """dq += ds k for one key block: see `blocks.over_key_blocks`.

    Relative keys are further keys, for dq or for the gradient of their own query.
    """
    PRECISION: tl.constexpr = const.PRECISION
    dq, dquery = state
    rows, k_ptr, k_stride, v_ptr, v_stride = operands
    k = load_tile(k_ptr, k_stride, n_first, valid, const.BLOCK_N, const.BLOCK_D, const.D)
    v = load_tile(v_ptr, v_stride, n_first, valid, const.BLOCK_N, const.BLOCK_DV, const.D_V)
    vectors = None
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(tile.first, n_first, tile.h, tile.H_q, tile.row, score, const)
    _, ds = tile_gradient(rows, k, v, vectors, n_first, keep, tile, score, const)
    dq = add_weighted_rows(dq, ds, k, PRECISION)
    if score.keys_ptr is not None:
        by_distance = unskewed(ds.to(rows.query.dtype))
        if score.query_ptr is None:
            dq = add_weighted_rows(dq, by_distance, vectors, PRECISION)
        else:
            dquery = add_weighted_rows(dquery, by_distance, vectors, PRECISION)
    return dq, dquery


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, delta_ptr, dquery_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, dquery_strides, mask, score,
    H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the delta of its rows, which dK/dV reads. Grid as forward.

    dquery: the gradient of the relative query, if there is one.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    k_ptr, k_stride = key_head(k_ptr, k_strides, tile, const)
    v_ptr, v_stride = key_head(v_ptr, v_strides, tile, const)
    q = load_queries(q_ptr, q_strides, tile, BLOCK_D, const.D, const)
    query = relative_query(
        q, tile.batch, tile.h, tile.first_q, tile.first, tile.in_rows, score, const
    )
    do = load_queries(do_ptr, do_strides, tile, const.BLOCK_DV, const.D_V, const)
    o = load_queries(o_ptr, o_strides, tile, const.BLOCK_DV, const.D_V, const)
    stats = tile.statistics + tile.rows
    delta = store_delta(o, do, dlse_ptr, delta_ptr, stats, tile.in_rows)
    lse = load_lse(lse_ptr + stats, tile.in_rows, score)

    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )
    operands = (Rows(q, query, do, lse, delta), k_ptr, k_stride, v_ptr, v_stride)
    dq, dquery = over_key_blocks(_grow_dq, state, tile, operands, mask, score, const)
    store_queries(dq_ptr, dq_strides, tile, dq * score.scale, BLOCK_D, const.D, const)
    if score.query_ptr is not None:
        dquery = dquery * score.scale
        store_queries(dquery_ptr, dquery_strides, tile, dquery, BLOCK_D, const.D, const)


class _Operands(NamedTuple):
    """What query blocks of one head meet: k and v of a tile of keys.

    dq_ptr: fp32 rows to add ds k to, or None.
    """

    k: Any
    v: Any
    q_ptr: Any
    q_stride: Any
    do_ptr: Any
    do_stride: Any
    lse_ptr: Any
    delta_ptr: Any
    dq_ptr: Any


@triton.jit
def _grow_dkv(state, m_first, in_rows, keep, h, tile, operands, score, const: tl.constexpr):
    """dk += ds^T q and dv += p^T do for one query block: see `blocks.over_query_blocks`.

    Transposed: keys down, queries across.
    """
    PRECISION: tl.constexpr = const.PRECISION
    dk, dv = state
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    n_first = tile.first
    row = tile.row
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = tile.k_pos[:, None]
    q = load_tile(operands.q_ptr, operands.q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, const.D)
    do = load_tile(
        operands.do_ptr, operands.do_stride, m_first, in_rows, BLOCK_M, const.BLOCK_DV, const.D_V
    )
    lse = load_lse(operands.lse_ptr + rows, in_rows, score)
    delta = load_vector(operands.delta_ptr + rows, in_rows, 0.0)
    s = rows_by_rows(operands.k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    if score.keys_ptr is not None:
        query = relative_query(q, tile.batch, h, tile.first_q, m_first, in_rows, score, const)
        vectors = vectors_of_tile(m_first, n_first, h, tile.H_q, row, score, const)
        s += tl.trans(relative_products(query, vectors, const.BLOCK_N, PRECISION))
    x, factor, before, capped = modified(s, rows[None, :], k_pos, h, row, score)
    p = weights(x, lse[None, :], factor)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    if score.dropout is not None:
        survivors = tl.trans(kept(m_first, n_first, h, tile.H_q, row, score, const))
        dv = add_weighted_rows(dv, dropped(p, survivors, score), do, PRECISION)
        dp = dropped(rows_by_rows(operands.v, do, PRECISION), survivors, score)
    else:
        dv = add_weighted_rows(dv, p, do, PRECISION)
        dp = rows_by_rows(operands.v, do, PRECISION)
    dx = p * (dp - delta[None, :])
    _, ds = gradient(dx, before, capped, rows[None, :], k_pos, h, row, keep, score)
    if operands.dq_ptr is not None:
        # Before dk, or LLVM puts a part of ds between the instructions of its product.
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq = add_weighted_rows(zeros, tl.trans(ds), operands.k, PRECISION)
        add_tile(operands.dq_ptr, const.D, m_first, dq, in_rows, BLOCK_M, BLOCK_D, const.D)
    dk = add_weighted_rows(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, mask, score,
    H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all G heads. 1-D grid: see `key_program`.

    dq_ptr: fp32 [B, H_q, T_q, D] to add the dQ of these keys to, without the scale, by atomics; or
    None.
    """
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = key_tile(H_q, H_q // G, T_q, T_k, mask, BLOCK_N)
    k = load_keys(k_ptr, k_strides, tile, BLOCK_D, const.D, const)
    v = load_keys(v_ptr, v_strides, tile, BLOCK_DV, const.D_V, const)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # Keys that no query may see touch their own rows of dk and dv alone, but every row of dq.
    there = None
    if dq_ptr is not None:
        there = tile.valid[:, None]
    heads = tl.where(any_key(tile.valid), G, 0)
    for g in range(0, heads):
        h = tile.h_k * G + g
        q_head, q_stride = head_at(q_ptr, tile.batch, h, tile.first_q, q_strides, const)
        do_head, do_stride = head_at(do_ptr, tile.batch, h, tile.first_q, do_strides, const)
        stats = (tile.batch * H_q + h).to(tl.int64) * T_q + tile.first_q
        dq_head = None
        if dq_ptr is not None:
            dq_head = dq_ptr + stats * const.D
        operands = _Operands(
            k, v, q_head, q_stride, do_head, do_stride, lse_ptr + stats, delta_ptr + stats, dq_head
        )
        dk, dv = over_query_blocks(
            _grow_dkv, (dk, dv), h, tile, operands, there, mask, score, const
        )
    store_keys(dk_ptr, dk_strides, tile, dk * score.scale, BLOCK_D, const.D, const)
    store_keys(dv_ptr, dv_strides, tile, dv, BLOCK_DV, const.D_V, const)


def _plan_dq(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dquery: Tensor | None,
) -> Launch:
    query = options.relative_query
    tile = tile_for("backward_dq", options, q, block_dim(q.shape[3]), block_dim(v.shape[3]))
    programs = query_programs(options, q, tile.BLOCK_M)
    mask, tables = launch_mask(options, q, k, tile, of_keys=True) if programs else (None, None)
    return Launch(
        attention_backward_dq_kernel,
        programs,
        tile,
        *map(strides, (q, k, v, o, do, dq)),
        None if dquery is None else strides(dquery),
        mask,
        kernel_score(options, q.dtype),
        *sizes(q, k),
        constants(tile, q.shape[3], v.shape[3], q.dtype, q, k, v, o, do, dq, query, dquery),
        tables=tables,
    )


def _plan_dkv(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    kernel: str = "backward_dkv",
) -> Launch:
    query = options.relative_query
    tile = tile_for(kernel, options, q, block_dim(q.shape[3]), block_dim(v.shape[3]))
    programs = key_programs(options, k, tile.BLOCK_N)
    mask, tables = launch_mask(options, q, k, tile, of_keys=False) if programs else (None, None)
    return Launch(
        attention_backward_dkv_kernel,
        programs,
        tile,
        *map(strides, (q, k, v, do, dk, dv)),
        mask,
        kernel_score(options, q.dtype),
        *sizes(q, k),
        constants(tile, q.shape[3], v.shape[3], q.dtype, q, k, v, do, dk, dv, query),
        tables=tables,
    )


_plan_one_pass = partial(_plan_dkv, kernel="backward_one_pass")


def launch_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v; delta fp32 like lse; and the
    gradient of options.relative_query as dq is that of q, empty without one.

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    o and lse as `launch_forward` returned them for the same q, k, v and options.
    """
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    dq = empty_in_layout(q, *q.shape[1:])
    dk = empty_in_layout(k, *k.shape[1:])
    dv = empty_in_layout(v, *v.shape[1:])
    delta = torch.empty_like(lse)
    query = options.relative_query
    dquery = None if query is None else empty_in_layout(query, *query.shape[1:])

    launch = launch_for(_plan_dq, options, (q, k, v, o, do, dlse), dq, dquery)
    launch(options, q, k, v, o, do, lse, dlse, dq, delta, dquery)
    launch = launch_for(_plan_dkv, options, (q, k, v, do), dk, dv)
    launch(options, q, k, v, do, lse, delta, dk, dv, None)
    return dq, dk, dv, delta, q.new_empty(0) if dquery is None else dquery


def launch_backward_one_pass(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `launch_backward`, with dQ added up by atomics; the last, which is empty, has no kernel.

    For any options without relative keys. Takes 4 bytes more for each element of q.
    """
    assert options.relative_keys is None, "left to launch_backward"
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    dq = empty_in_layout(q, *q.shape[1:])
    dk = empty_in_layout(k, *k.shape[1:])
    dv = empty_in_layout(v, *v.shape[1:])
    delta = torch.empty_like(lse)
    total = launch_start_dq(do, dlse, q, o, lse, delta, options)
    launch = launch_for(_plan_one_pass, options, (q, k, v, do), dk, dv)
    launch(options, q, k, v, do, lse, delta, dk, dv, total)
    launch_finish_dq(total, dq, options)
    return dq, dk, dv, delta, q.new_empty(0)
