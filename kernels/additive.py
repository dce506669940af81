"""Additive attention: the score of a pair is sum_d u_d tanh(a_d + b_d), a a query and b a key.

Bahdanau et al. 2015 (arXiv 1409.0473) score query s and key h by u^T tanh(W s + U h); the
projections a = W s and b = U h are left to the caller. No product of matrices gives these scores:
each tile takes them one hidden column at a time, so nothing of [T_q, T_k, D] is ever held. Columns
are read from copies that have the positions of a column side by side.

Backward, with p the weights, ds = p * (do v^T - delta) as in `backward`, and t = tanh(a_d + b_d):

    da_d = u_d sum_j ds (1 - t^2)      db_d = u_d sum_i ds (1 - t^2)      du_d = sum_ij ds t

One program a tile of queries for da and du, one a tile of keys for db and dv; sums are taken in a
fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import tiles
from .launch.arguments import (
    aligned,
    block_dim,
    blocks,
    dot_precision,
    empty_in_layout,
    index_type,
    key_programs,
    query_programs,
    sizes,
    strides,
)
from .launch.block_sparsity import mask_for_keys, mask_for_queries
from .launch.tiles import TileConfig
from .rules.mask import (
    any_key,
    batch_row,
    full_block,
    key_plan,
    masked_block,
    query_plan,
    valid_keys,
    visible,
    worth_loading,
)
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.score import tanh
from .rules.softmax import LOG2E, finish, online_step, weights
from .rules.tile import (
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
def _bent(down_ptr, T_down, down, across_ptr, T_across, across, in_down, in_across, d):
    """tanh of column d, [DOWN, ACROSS]: of queries and keys, or of keys and queries.

    *_ptr: columns of a head, each of T_* positions. in_*: which positions exist, None = all.
    """
    d = tl.cast(d, tl.int64)
    x = load_vector(down_ptr + d * T_down + down, in_down, 0.0).to(tl.float32)
    y = load_vector(across_ptr + d * T_across + across, in_across, 0.0).to(tl.float32)
    x = x[:, None] + y[None, :]
    EXACT: tl.constexpr = down_ptr.dtype.element_ty == tl.float32
    if EXACT:
        bent = tanh(x)
    else:
        # An absolute error of 1e-7 is far below what sums of 16-bit numbers are good for, and a
        # reciprocal by way of rsqrt is one instruction.
        root = tl.rsqrt(tl.exp2(x * (2 * LOG2E)) + 1)
        bent = 1 - 2 * (root * root)
    return bent


@triton.jit
def _scores(
    u_ptr, down_ptr, T_down, down, across_ptr, T_across, across, in_down, in_across,
    D: tl.constexpr,
):  # fmt: skip
    s = tl.zeros([down.shape[0], across.shape[0]], tl.float32)
    for d in range(0, D):
        u = tl.load(u_ptr + d).to(tl.float32)
        s += u * _bent(down_ptr, T_down, down, across_ptr, T_across, across, in_down, in_across, d)
    return s


@triton.jit
def _columns(ptr, b, h, heads, T, D: tl.constexpr):
    """Pointer to the columns of a head: ptr is [B, heads, D, T]."""
    return ptr + (b * heads + h).to(tl.int64) * D * T


@triton.jit
def _attend(
    acc, m, l, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, T_q, T_k, rows, in_rows, n_first, valid, keep,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into the state of the rows; valid = keep = None for a full block."""
    k_pos = n_first + tl.arange(0, BLOCK_N)
    s = _scores(u_ptr, a_ptr, T_q, rows, b_ptr, T_k, k_pos, in_rows, valid, D)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None
    p, rescale, m, l = online_step(s, m, l, LOG2E, MASKED)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_forward_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, o_ptr, lse_ptr, v_strides, o_strides, mask, H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of a tile of queries. Grid and loops as forward's."""
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    a_ptr = _columns(a_ptr, b, h_q, H_q, T_q, D)
    b_ptr = _columns(b_ptr, b, h_k, H_q // G, T_k, D)
    u_ptr += h_q * D
    v_ptr, v_stride = head(v_ptr, b, h_k, 0, v_strides, INDEX)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        acc, m, l = _attend(
            acc, m, l, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, T_q, T_k, rows, in_rows,
            full_block(i, place, mask) * BLOCK_N, None, None,
            D, D_V, BLOCK_N, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            acc, m, l = _attend(
                acc, m, l, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, T_q, T_k, rows, in_rows,
                n_first, valid, keep, D, D_V, BLOCK_N, BLOCK_DV, PRECISION,
            )  # fmt: skip

    o, lse = finish(acc, m, l)
    o_ptr, o_stride = head(o_ptr, b, h_q, 0, o_strides, INDEX)
    store_tile(o_ptr, o_stride, m_first, o, in_rows, BLOCK_M, BLOCK_DV, D_V)
    tl.store(lse_ptr + (b * H_q + h_q).to(tl.int64) * T_q + rows, lse, mask=in_rows)


@triton.jit
def _column_sums(
    sums, sums_of_u, ds, u_ptr, down_ptr, T_down, down, across_ptr, T_across, across, in_down,
    in_across, D: tl.constexpr, WITH_U: tl.constexpr,
):  # fmt: skip
    """What gradients ds [DOWN, ACROSS] of scores add to those of the rows down and of u.

    sums [DOWN, BLOCK_D]; sums_of_u, if WITH_U, the same, to be summed over its rows.
    """
    cols = tl.arange(0, sums.shape[1])[None, :]
    for d in range(0, D):
        t = _bent(down_ptr, T_down, down, across_ptr, T_across, across, in_down, in_across, d)
        u = tl.load(u_ptr + d).to(tl.float32)
        grown = u * tl.sum(ds * (1 - t * t), 1)
        sums += tl.where(cols == d, grown[:, None], 0.0)
        if WITH_U:
            sums_of_u += tl.where(cols == d, tl.sum(ds * t, 1)[:, None], 0.0)
    return sums, sums_of_u


@triton.jit
def _grow_da(
    da, du, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, do, lse, delta, T_q, T_k, rows, in_rows, n_first,
    valid, keep,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into da and du; valid = keep = None for a full block."""
    k_pos = n_first + tl.arange(0, BLOCK_N)
    s = _scores(u_ptr, a_ptr, T_q, rows, b_ptr, T_k, k_pos, in_rows, valid, D)
    p = weights(s, lse[:, None], LOG2E)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    ds = p * (rows_by_rows(do, v, PRECISION) - delta[:, None])
    return _column_sums(
        da, du, ds, u_ptr, a_ptr, T_q, rows, b_ptr, T_k, k_pos, in_rows, valid, D, True
    )


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_backward_da_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, da_ptr, du_ptr, delta_ptr,
    v_strides, o_strides, do_strides, da_strides, mask, H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """da of a tile of queries, its part of du, and the delta of its rows, which db/dv reads.

    du is [tiles, B, H_q, D], a part for each program.
    """
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    a_ptr = _columns(a_ptr, b, h_q, H_q, T_q, D)
    b_ptr = _columns(b_ptr, b, h_k, H_q // G, T_k, D)
    u_ptr += h_q * D
    v_ptr, v_stride = head(v_ptr, b, h_k, 0, v_strides, INDEX)
    o_ptr, o_stride = head(o_ptr, b, h_q, 0, o_strides, INDEX)
    do_ptr, do_stride = head(do_ptr, b, h_q, 0, do_strides, INDEX)
    da_ptr, da_stride = head(da_ptr, b, h_q, 0, da_strides, INDEX)
    stats = (b * H_q + h_q).to(tl.int64) * T_q + rows
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    o = load_tile(o_ptr, o_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= load_vector(dlse_ptr + stats, in_rows, 0.0)
    tl.store(delta_ptr + stats, delta, mask=in_rows)
    lse = load_vector(lse_ptr + stats, in_rows, float("inf"))

    da = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    du = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        da, du = _grow_da(
            da, du, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, do, lse, delta, T_q, T_k, rows, in_rows,
            full_block(i, place, mask) * BLOCK_N, None, None,
            D, D_V, BLOCK_N, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            da, du = _grow_da(
                da, du, a_ptr, b_ptr, u_ptr, v_ptr, v_stride, do, lse, delta, T_q, T_k, rows,
                in_rows, n_first, valid, keep, D, D_V, BLOCK_N, BLOCK_DV, PRECISION,
            )  # fmt: skip
    store_tile(da_ptr, da_stride, m_first, da, in_rows, BLOCK_M, BLOCK_D, D)
    batches = tl.num_programs(0) // (tl.cdiv(T_q, BLOCK_M) * H_q)
    cols = tl.arange(0, BLOCK_D)
    du_ptr += ((tile * batches + b) * H_q + h_q).to(tl.int64) * D
    tl.store(du_ptr + cols, tl.sum(du, 0), mask=cols < D)


@triton.jit
def _grow_db(
    db, dv, a_ptr, b_ptr, u_ptr, v, do_ptr, do_stride, lse_ptr, delta_ptr, T_q, T_k, m_first, k_pos,
    in_rows, valid, keep,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one query block into db and dv, transposed: keys down, queries across."""
    rows = m_first + tl.arange(0, BLOCK_M)
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    lse = load_vector(lse_ptr + rows, in_rows, float("inf"))
    delta = load_vector(delta_ptr + rows, in_rows, 0.0)
    s = _scores(u_ptr, b_ptr, T_k, k_pos, a_ptr, T_q, rows, valid, in_rows, D)
    p = weights(s, lse[None, :], LOG2E)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    dv = add_weighted_rows(dv, p, do, PRECISION)
    ds = p * (rows_by_rows(v, do, PRECISION) - delta[None, :])
    db, _ = _column_sums(
        db, db, ds, u_ptr, b_ptr, T_k, k_pos, a_ptr, T_q, rows, valid, in_rows, D, False
    )
    return db, dv


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_backward_dbv_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, db_ptr, dv_ptr,
    v_strides, do_strides, db_strides, dv_strides, mask, H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """db and dv of a tile of keys, over the queries of all G heads. Grid as dK/dV's."""
    H_k = H_q // G
    tile, b, h_k = key_program(T_k, H_k, mask, BLOCK_N)
    n_first = tile * BLOCK_N
    row = batch_row(b, T_q, T_k, mask)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    valid = valid_keys(k_pos, row, mask)
    b_ptr = _columns(b_ptr, b, h_k, H_k, T_k, D)
    v_ptr, v_stride = head(v_ptr, b, h_k, 0, v_strides, INDEX)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)

    db = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    k_first = tl.maximum(n_first, row.start)
    k_last = tl.minimum(n_first + BLOCK_N, row.end) - 1
    heads = tl.where(any_key(valid), G, 0)
    for g in range(0, heads):
        h_q = h_k * G + g
        a_head = _columns(a_ptr, b, h_q, H_q, T_q, D)
        do_head, do_stride = head(do_ptr, b, h_q, 0, do_strides, INDEX)
        stats = (b * H_q + h_q).to(tl.int64) * T_q
        full, boundary, place = query_plan(tile, k_first, k_last, h_q, row, mask, BLOCK_M)
        for i in range(0, full):
            db, dv = _grow_db(
                db, dv, a_head, b_ptr, u_ptr + h_q * D, v, do_head, do_stride, lse_ptr + stats,
                delta_ptr + stats, T_q, T_k, full_block(i, place, mask) * BLOCK_M, k_pos, None,
                valid, None, D, D_V, BLOCK_M, BLOCK_DV, PRECISION,
            )  # fmt: skip
        for i in range(0, boundary):
            m_first = masked_block(i, place, mask) * BLOCK_M
            rows = m_first + tl.arange(0, BLOCK_M)
            keep = visible(rows[None, :], k_pos[:, None], h_q, row, mask)
            db, dv = _grow_db(
                db, dv, a_head, b_ptr, u_ptr + h_q * D, v, do_head, do_stride, lse_ptr + stats,
                delta_ptr + stats, T_q, T_k, m_first, k_pos, rows < row.T_q, valid, keep,
                D, D_V, BLOCK_M, BLOCK_DV, PRECISION,
            )  # fmt: skip
    # Keys that no query may see met the blocks without a mask too.
    db = tl.where(valid[:, None], db, 0.0)
    dv = tl.where(valid[:, None], dv, 0.0)
    in_keys = k_pos < row.T_k
    db_ptr, db_stride = head(db_ptr, b, h_k, 0, db_strides, INDEX)
    dv_ptr, dv_stride = head(dv_ptr, b, h_k, 0, dv_strides, INDEX)
    store_tile(db_ptr, db_stride, n_first, db, in_keys, BLOCK_N, BLOCK_D, D)
    store_tile(dv_ptr, dv_stride, n_first, dv, in_keys, BLOCK_N, BLOCK_DV, D_V)


def _by_columns(x: Tensor) -> Tensor:
    """[B, H, T, D] as contiguous [B, H, D, T]."""
    return x.transpose(2, 3).contiguous()


def _tile(kernel: str, element_size: int, widest: int) -> TileConfig:
    """The tile of "forward", "da" or "dbv", widest being the larger of BLOCK_D and BLOCK_DV.

    Most of the time goes into tanh, so a tile is as large as registers hold beside accumulators:
    one of forward, as wide as v; two of the others. IEEE products of fp32 take registers as well.
    """
    arch = tiles.current_arch()
    if arch == "interpreter":
        return TileConfig(16, 16)
    fp32 = element_size == 4
    warps = 8 if arch.startswith("sm_") else 4  # 256 threads either way
    if kernel == "forward":
        return TileConfig(32 if fp32 else 64, 32, warps)
    own = 32 if widest <= (64 if fp32 else 128) else 16
    other = 64 if warps == 8 and not fp32 else 32
    if kernel == "da":
        return TileConfig(own, other, warps)
    return TileConfig(16, 32, warps) if fp32 else TileConfig(other, own, warps)


def launch_additive_forward(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's dtype and memory order, lse fp32 [B, H_q, T_q].

    q [B, H_q, T_q, D] and k [B, H_k, T_k, D] projected, v [B, H_k, T_k, D_v], last dims contiguous
    and whole multiples of 16 bytes; u [H_q, D] contiguous. Of options the masks count.
    """
    v = aligned(v)
    _, H_q, T_q, D = q.shape
    D_v = v.shape[3]
    o = empty_in_layout(q, H_q, T_q, D_v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = _tile("forward", v.element_size(), block_dim(D_v))
    if programs := query_programs(options, q, tile.BLOCK_M):
        additive_forward_kernel[(programs,)](
            _by_columns(q), _by_columns(k), u, v, o, lse, strides(v), strides(o),
            mask_for_queries(options, q, k, tile), *sizes(q, k),
            D, D_v, tile.BLOCK_M, tile.BLOCK_N, block_dim(D_v), index_type(v, o),
            dot_precision(v.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return o, lse


def launch_additive_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, u: Tensor, o: Tensor,
    lse: Tensor, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v; du fp32 [H_q, D].

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    the rest as `launch_additive_forward` took and gave it.
    """
    v, o, do = aligned(v), aligned(o), aligned(do)
    B, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    dq, dk = empty_in_layout(q, H_q, T_q, D), empty_in_layout(k, H_k, T_k, D)
    dv = empty_in_layout(v, H_k, T_k, D_v)
    delta = torch.empty_like(lse)
    a, b = _by_columns(q), _by_columns(k)
    dims = (block_dim(D), block_dim(D_v))
    promises = (index_type(v, o, do, dq, dk, dv), dot_precision(v.dtype))

    tile = _tile("da", v.element_size(), max(dims))
    du = torch.empty(blocks(T_q, tile.BLOCK_M), B, H_q, D, dtype=torch.float32, device=q.device)
    if programs := query_programs(options, q, tile.BLOCK_M):
        additive_backward_da_kernel[(programs,)](
            a, b, u, v, o, do, lse, dlse, dq, du, delta, *map(strides, (v, o, do, dq)),
            mask_for_queries(options, q, k, tile), *sizes(q, k),
            D, D_v, tile.BLOCK_M, tile.BLOCK_N, *dims, *promises,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    tile = _tile("dbv", v.element_size(), max(dims))
    if programs := key_programs(options, k, tile.BLOCK_N):
        additive_backward_dbv_kernel[(programs,)](
            a, b, u, v, do, lse, delta, dk, dv, *map(strides, (v, do, dk, dv)),
            mask_for_keys(options, q, k, tile), *sizes(q, k),
            D, D_v, tile.BLOCK_M, tile.BLOCK_N, *dims, *promises,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq, dk, dv, du.sum((0, 1))
