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
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_atomic import launch_finish_dq, launch_start_dq
from .launch.arguments import (
    aligned,
    block_dim,
    dot_precision,
    empty_in_layout,
    index_type,
    kernel_score,
    key_programs,
    query_programs,
    sizes,
    strides,
    tile_for,
)
from .launch.block_sparsity import mask_for_keys, mask_for_queries
from .launch.launches import Launch, launch_for
from .rules.mask import (
    any_key,
    batch_row,
    full_block,
    key_plan,
    masked_block,
    memory_rows,
    query_plan,
    valid_keys,
    visible,
    worth_loading,
)
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import relative_products, relative_query, unskewed, vectors_of_tile
from .rules.score import dropped, gradient, kept, modified
from .rules.score_gradient import load_lse, tile_gradient
from .rules.softmax import weights
from .rules.tile import (
    add_tile,
    head,
    key_program,
    load_tile,
    load_vector,
    query_program,
    query_rows,
    store_tile,
)

if TYPE_CHECKING:
    from fastattn.options import Options


@triton.jit
def _grow_dq(
    dq, dquery, q, query, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, m_first, n_first, valid,
    keep, h, H_q, row, score,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq += ds k for one key block; valid = keep = None for a full block.

    Relative keys are further keys, for dq or for the gradient of their own query.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    vectors = None
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(
            m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N, D, BLOCK_D
        )
    _, ds = tile_gradient(
        q, do, lse, delta, k, v, query, vectors, m_first, n_first, keep, h, H_q, row, score,
        PRECISION,
    )  # fmt: skip
    dq = add_weighted_rows(dq, ds, k, PRECISION)
    if score.keys_ptr is not None:
        by_distance = unskewed(ds.to(query.dtype))
        if score.query_ptr is None:
            dq = add_weighted_rows(dq, by_distance, vectors, PRECISION)
        else:
            dquery = add_weighted_rows(dquery, by_distance, vectors, PRECISION)
    return dq, dquery


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, delta_ptr, dquery_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, dquery_strides, mask, score,
    H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the delta of its rows, which dK/dV reads. Grid as forward.

    dquery: the gradient of the relative query, if there is one.
    """
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    batch, first_q, first_k = memory_rows(b, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    q_ptr, q_stride = head(q_ptr, batch, h_q, first_q, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, batch, h_k, first_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, batch, h_k, first_k, v_strides, INDEX)
    o_ptr, o_stride = head(o_ptr, batch, h_q, first_q, o_strides, INDEX)
    do_ptr, do_stride = head(do_ptr, batch, h_q, first_q, do_strides, INDEX)
    dq_ptr, dq_stride = head(dq_ptr, batch, h_q, first_q, dq_strides, INDEX)

    stats = (batch * H_q + h_q).to(tl.int64) * T_q + first_q + rows
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    query = relative_query(q, batch, h_q, first_q, m_first, in_rows, score, D, BLOCK_D, INDEX)
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    o = load_tile(o_ptr, o_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= load_vector(dlse_ptr + stats, in_rows, 0.0)
    tl.store(delta_ptr + stats, delta, mask=in_rows)
    lse = load_lse(lse_ptr + stats, in_rows, score)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dquery = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        dq, dquery = _grow_dq(
            dq, dquery, q, query, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, m_first,
            full_block(i, place, mask) * BLOCK_N, None, None, h_q, H_q, row, score,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            dq, dquery = _grow_dq(
                dq, dquery, q, query, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, m_first,
                n_first, valid, keep, h_q, H_q, row, score,
                D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
    store_tile(dq_ptr, dq_stride, m_first, dq * score.scale, in_rows, BLOCK_M, BLOCK_D, D)
    if score.query_ptr is not None:
        dquery_ptr, stride = head(dquery_ptr, batch, h_q, first_q, dquery_strides, INDEX)
        store_tile(dquery_ptr, stride, m_first, dquery * score.scale, in_rows, BLOCK_M, BLOCK_D, D)


@triton.jit
def _grow_dkv(
    dk, dv, k, v, q_ptr, q_stride, do_ptr, do_stride, lse_ptr, delta_ptr, dq_ptr, batch,
    first_q, m_first, n_first, in_rows, keep, h, H_q, row, score,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do for one query block, transposed: keys down, queries across.

    With dq_ptr, rows of fp32, ds k is added there.
    """
    BLOCK_N: tl.constexpr = k.shape[0]
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = (n_first + tl.arange(0, BLOCK_N))[:, None]
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    lse = load_lse(lse_ptr + rows, in_rows, score)
    delta = load_vector(delta_ptr + rows, in_rows, 0.0)
    s = rows_by_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    if score.keys_ptr is not None:
        query = relative_query(q, batch, h, first_q, m_first, in_rows, score, D, BLOCK_D, INDEX)
        vectors = vectors_of_tile(
            m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N, D, BLOCK_D
        )
        s += tl.trans(relative_products(query, vectors, BLOCK_N, PRECISION))
    x, factor, before, capped = modified(s, rows[None, :], k_pos, h, row, score)
    p = weights(x, lse[None, :], factor)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    if score.dropout is not None:
        survivors = tl.trans(kept(m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N))
        dv = add_weighted_rows(dv, dropped(p, survivors, score), do, PRECISION)
        dp = dropped(rows_by_rows(v, do, PRECISION), survivors, score)
    else:
        dv = add_weighted_rows(dv, p, do, PRECISION)
        dp = rows_by_rows(v, do, PRECISION)
    dx = p * (dp - delta[None, :])
    _, ds = gradient(dx, before, capped, rows[None, :], k_pos, h, row, keep, score)
    if dq_ptr is not None:
        # Before dk, or LLVM puts a part of ds between the instructions of its product.
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq = add_weighted_rows(zeros, tl.trans(ds), k, PRECISION)
        add_tile(dq_ptr, D, m_first, dq, in_rows, BLOCK_M, BLOCK_D, D)
    dk = add_weighted_rows(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_backward_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, mask, score,
    H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all G heads. 1-D grid: see `key_program`.

    dq_ptr: fp32 [B, H_q, T_q, D] to add the dQ of these keys to, without the scale, by atomics; or
    None.
    """
    tile, b, h_k = key_program(T_k, H_q // G, mask, BLOCK_N)
    n_first = tile * BLOCK_N
    row = batch_row(b, T_q, T_k, mask)
    batch, first_q, first_k = memory_rows(b, mask)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    in_keys = k_pos < row.T_k
    valid = valid_keys(k_pos, row, mask)
    k_ptr, k_stride = head(k_ptr, batch, h_k, first_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, batch, h_k, first_k, v_strides, INDEX)
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    k_first = tl.maximum(n_first, row.start)
    k_last = tl.minimum(n_first + BLOCK_N, row.end) - 1
    # Keys that no query may see touch their own rows of dk and dv alone, but every row of dq.
    there = None
    if dq_ptr is not None:
        there = valid[:, None]
    heads = tl.where(any_key(valid), G, 0)
    for g in range(0, heads):
        h_q = h_k * G + g
        q_head, q_stride = head(q_ptr, batch, h_q, first_q, q_strides, INDEX)
        do_head, do_stride = head(do_ptr, batch, h_q, first_q, do_strides, INDEX)
        stats = (batch * H_q + h_q).to(tl.int64) * T_q + first_q
        dq_head = None
        if dq_ptr is not None:
            dq_head = dq_ptr + stats * D
        full, boundary, place = query_plan(tile, k_first, k_last, h_q, row, mask, BLOCK_M)
        for i in range(0, full):
            dk, dv = _grow_dkv(
                dk, dv, k, v, q_head, q_stride, do_head, do_stride, lse_ptr + stats,
                delta_ptr + stats, dq_head, batch, first_q, full_block(i, place, mask) * BLOCK_M,
                n_first, None, there, h_q, H_q, row, score,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, INDEX, PRECISION,
            )  # fmt: skip
        for i in range(0, boundary):
            m_first = masked_block(i, place, mask) * BLOCK_M
            rows = m_first + tl.arange(0, BLOCK_M)
            keep = visible(rows[None, :], k_pos[:, None], h_q, row, mask)
            if there is not None:
                keep = keep & there
            dk, dv = _grow_dkv(
                dk, dv, k, v, q_head, q_stride, do_head, do_stride, lse_ptr + stats,
                delta_ptr + stats, dq_head, batch, first_q, m_first, n_first, rows < row.T_q, keep,
                h_q, H_q, row, score, D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, INDEX, PRECISION,
            )  # fmt: skip

    # The weights of keys that no query may see need not be masked: they end here.
    dk = tl.where(valid[:, None], dk * score.scale, 0.0)
    dv = tl.where(valid[:, None], dv, 0.0)
    dk_ptr, dk_stride = head(dk_ptr, batch, h_k, first_k, dk_strides, INDEX)
    dv_ptr, dv_stride = head(dv_ptr, batch, h_k, first_k, dv_strides, INDEX)
    store_tile(dk_ptr, dk_stride, n_first, dk, in_keys, BLOCK_N, BLOCK_D, D)
    store_tile(dv_ptr, dv_stride, n_first, dv, in_keys, BLOCK_N, BLOCK_DV, D_V)


def _plan_dq(
    options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dlse: Tensor | None,
    dq: Tensor, dquery: Tensor | None,
) -> Launch:  # fmt: skip
    dims = (block_dim(q.shape[3]), block_dim(v.shape[3]))
    tile = tile_for("backward_dq", options, q, *dims)
    programs = query_programs(options, q, tile.BLOCK_M)
    return Launch(
        attention_backward_dq_kernel, programs, tile,
        *map(strides, (q, k, v, o, do, dq)), None if dquery is None else strides(dquery),
        mask_for_queries(options, q, k, tile) if programs else None,
        kernel_score(options, q.dtype), *sizes(q, k),
        q.shape[3], v.shape[3], tile.BLOCK_M, tile.BLOCK_N, *dims,
        index_type(q, k, v, o, do, dq, options.relative_query, dquery), dot_precision(q.dtype),
    )  # fmt: skip


def _plan_dkv(
    options: Options, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor,
    kernel: str = "backward_dkv",
) -> Launch:  # fmt: skip
    dims = (block_dim(q.shape[3]), block_dim(v.shape[3]))
    tile = tile_for(kernel, options, q, *dims)
    programs = key_programs(options, k, tile.BLOCK_N)
    return Launch(
        attention_backward_dkv_kernel, programs, tile, *map(strides, (q, k, v, do, dk, dv)),
        mask_for_keys(options, q, k, tile) if programs else None,
        kernel_score(options, q.dtype), *sizes(q, k),
        q.shape[3], v.shape[3], tile.BLOCK_M, tile.BLOCK_N, *dims,
        index_type(q, k, v, do, dk, dv, options.relative_query), dot_precision(q.dtype),
    )  # fmt: skip


_plan_one_pass = partial(_plan_dkv, kernel="backward_one_pass")


def launch_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
    launch(q, k, v, o, do, lse, dlse, dq, delta, dquery)
    launch = launch_for(_plan_dkv, options, (q, k, v, do), dk, dv)
    launch(q, k, v, do, lse, delta, dk, dv, None)
    return dq, dk, dv, delta, q.new_empty(0) if dquery is None else dquery


def launch_backward_one_pass(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
    launch(q, k, v, do, lse, delta, dk, dv, total)
    launch_finish_dq(total, dq, options)
    return dq, dk, dv, delta, q.new_empty(0)
