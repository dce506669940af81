"""Additive attention: score sum_d u_d tanh(a_d + b_d) of query a and key b.

Bahdanau et al. 2015 (arXiv 1409.0473) score query s and key h by u^T tanh(W s + U h); the
projections a = W s and b = U h are left to the caller. These scores are no matrix product: a tile
sums them one hidden column at a time, without a [T_q, T_k, D] tensor. Columns are read from
transposed copies, contiguous along positions.

Backward, with p the weights, ds = p * (do v^T - delta) as in `backward`, and t = tanh(a_d + b_d):

    da_d = u_d sum_j ds (1 - t^2)      db_d = u_d sum_i ds (1 - t^2)      du_d = sum_ij ds t

One program per tile of queries computes da and du, one per tile of keys db and dv, with sums in a
fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import tiles
from .launch.arguments import (
    aligned,
    block_dim,
    blocks,
    constants,
    empty_in_layout,
    key_programs,
    query_programs,
    sizes,
    strides,
)
from .launch.block_sparsity import mask_for_keys, mask_for_queries
from .launch.tiles import TileConfig
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
from .rules.score import tanh
from .rules.score_gradient import store_delta
from .rules.softmax import LOG2E, finish, online_step, weights
from .rules.tile import head_at, load_block, load_vector

if TYPE_CHECKING:
    from fastattn.options import Options


class _Columns(NamedTuple):
    """Columns of a head, [D, T], the tile's rows, and which of them exist (None = all)."""

    ptr: Any
    T: Any
    rows: Any
    exist: Any


@triton.jit
def _tanh_of_column(d, down, across):
    """tanh of column d, [DOWN, ACROSS]: of queries and keys, or of keys and queries."""
    d = tl.cast(d, tl.int64)
    x = load_vector(down.ptr + d * down.T + down.rows, down.exist, 0.0).to(tl.float32)
    y = load_vector(across.ptr + d * across.T + across.rows, across.exist, 0.0).to(tl.float32)
    x = x[:, None] + y[None, :]
    EXACT: tl.constexpr = down.ptr.dtype.element_ty == tl.float32
    if EXACT:
        bent = tanh(x)
    else:
        # An absolute error of 1e-7 is far below that of sums of 16-bit numbers, and a reciprocal by
        # rsqrt is one instruction.
        root = tl.rsqrt(tl.exp2(x * (2 * LOG2E)) + 1)
        bent = 1 - 2 * (root * root)
    return bent


@triton.jit
def _scores(u_ptr, down, across, D: tl.constexpr):
    s = tl.zeros([down.rows.shape[0], across.rows.shape[0]], tl.float32)
    for d in range(0, D):
        s += tl.load(u_ptr + d).to(tl.float32) * _tanh_of_column(d, down, across)
    return s


@triton.jit
def _columns(ptr, b, h, heads, T, D: tl.constexpr):
    """Pointer to the columns of a head: ptr is [B, heads, D, T]."""
    return ptr + (b * heads + h).to(tl.int64) * D * T


class _Operands(NamedTuple):
    """Operands of a loop over key blocks: columns of queries and keys, u of the head, and v."""

    queries: _Columns
    b_ptr: Any
    u_ptr: Any
    v_ptr: Any
    v_stride: Any


@triton.jit
def _operands(a_ptr, b_ptr, u_ptr, v_ptr, v_strides, tile, G, T_q, T_k, const: tl.constexpr):
    a_ptr = _columns(a_ptr, tile.batch, tile.h, tile.H_q, T_q, const.D)
    b_ptr = _columns(b_ptr, tile.batch, tile.h_k, tile.H_q // G, T_k, const.D)
    v_ptr, v_stride = key_head(v_ptr, v_strides, tile, const)
    queries = _Columns(a_ptr, T_q, tile.rows, tile.in_rows)
    return _Operands(queries, b_ptr, u_ptr + tile.h * const.D, v_ptr, v_stride)


@triton.jit
def _attend(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Loop body for one key block: see `blocks.over_key_blocks`."""
    PRECISION: tl.constexpr = const.PRECISION
    acc, m, l = state
    queries, b_ptr, u_ptr, v_ptr, v_stride = operands
    k_pos = n_first + tl.arange(0, const.BLOCK_N)
    keys = _Columns(b_ptr, tile.row.T_k, k_pos, valid)
    s = _scores(u_ptr, queries, keys, const.D)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None
    p, rescale, m, l = online_step(s, m, l, LOG2E, MASKED)
    v = load_block(v_ptr, v_stride, n_first, valid, const.BLOCK_N, const.BLOCK_DV, const.D_V)
    acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_forward_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, o_ptr, lse_ptr, v_strides, o_strides, mask, H_q, G, T_q, T_k,
    const: tl.constexpr,
):  # fmt: skip
    """o and lse of a tile of queries. Grid and loops as in `forward`."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    operands = _operands(a_ptr, b_ptr, u_ptr, v_ptr, v_strides, tile, G, T_q, T_k, const)
    state = (
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    acc, m, l = over_key_blocks(_attend, state, tile, operands, mask, None, const)
    o, lse = finish(acc, m, l)
    store_queries(o_ptr, o_strides, tile, o, BLOCK_DV, const.D_V, const)
    tl.store(lse_ptr + tile.statistics + tile.rows, lse, mask=tile.in_rows)


@triton.jit
def _column_sums(sums, sums_of_u, ds, u_ptr, down, across, D: tl.constexpr, WITH_U: tl.constexpr):
    """Add the contribution of score gradients ds [DOWN, ACROSS] to the gradients of the rows down
    and of u.

    sums [DOWN, BLOCK_D]; sums_of_u, if WITH_U, the same, to be summed over its rows.
    """
    cols = tl.arange(0, sums.shape[1])[None, :]
    for d in range(0, D):
        t = _tanh_of_column(d, down, across)
        u = tl.load(u_ptr + d).to(tl.float32)
        grown = u * tl.sum(ds * (1 - t * t), 1)
        sums += tl.where(cols == d, grown[:, None], 0.0)
        if WITH_U:
            sums_of_u += tl.where(cols == d, tl.sum(ds * t, 1)[:, None], 0.0)
    return sums, sums_of_u


@triton.jit
def _grow_da(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Add one key block to da and du: see `blocks.over_key_blocks`."""
    PRECISION: tl.constexpr = const.PRECISION
    da, du = state
    columns, do, lse, delta = operands
    queries, b_ptr, u_ptr, v_ptr, v_stride = columns
    k_pos = n_first + tl.arange(0, const.BLOCK_N)
    keys = _Columns(b_ptr, tile.row.T_k, k_pos, valid)
    s = _scores(u_ptr, queries, keys, const.D)
    p = weights(s, lse[:, None], LOG2E, keep)
    v = load_block(v_ptr, v_stride, n_first, valid, const.BLOCK_N, const.BLOCK_DV, const.D_V)
    ds = p * (rows_by_rows(do, v, PRECISION) - delta[:, None])
    return _column_sums(da, du, ds, u_ptr, queries, keys, const.D, True)


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_backward_da_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, da_ptr, du_ptr, delta_ptr,
    v_strides, o_strides, do_strides, da_strides, mask, H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """da of a tile of queries, its part of du, and the rows' delta, which db/dv reads.

    du is [tiles, B, H_q, D], a part for each program.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    operands = _operands(a_ptr, b_ptr, u_ptr, v_ptr, v_strides, tile, G, T_q, T_k, const)
    do = load_queries(do_ptr, do_strides, tile, const.BLOCK_DV, const.D_V, const)
    o = load_queries(o_ptr, o_strides, tile, const.BLOCK_DV, const.D_V, const)
    stats = tile.statistics + tile.rows
    delta = store_delta(o, do, dlse_ptr, delta_ptr, stats, tile.in_rows)
    lse = load_vector(lse_ptr + stats, tile.in_rows, float("inf"))

    zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    da, du = over_key_blocks(
        _grow_da, (zeros, zeros), tile, (operands, do, lse, delta), mask, None, const
    )
    store_queries(da_ptr, da_strides, tile, da, BLOCK_D, const.D, const)
    batches = tl.num_programs(0) // (tl.cdiv(T_q, BLOCK_M) * H_q)
    cols = tl.arange(0, BLOCK_D)
    part = (tile.number * batches + tile.batch) * H_q + tile.h
    tl.store(du_ptr + part.to(tl.int64) * const.D + cols, tl.sum(du, 0), mask=cols < const.D)


@triton.jit
def _grow_db(state, m_first, in_rows, keep, h, tile, operands, score, const: tl.constexpr):
    """Add one query block to db and dv: see `blocks.over_query_blocks`.

    Transposed: keys down, queries across. operands: columns of the keys, v, u of the head, then the
    queries' operands.
    """
    PRECISION: tl.constexpr = const.PRECISION
    db, dv = state
    keys, v, u_ptr, a_ptr, do_ptr, do_stride, lse_ptr, delta_ptr = operands
    rows = m_first + tl.arange(0, const.BLOCK_M)
    queries = _Columns(a_ptr, tile.row.T_q, rows, in_rows)
    do = load_block(do_ptr, do_stride, m_first, in_rows, const.BLOCK_M, const.BLOCK_DV, const.D_V)
    lse = load_vector(lse_ptr + rows, in_rows, float("inf"))
    delta = load_vector(delta_ptr + rows, in_rows, 0.0)
    s = _scores(u_ptr, keys, queries, const.D)
    p = weights(s, lse[None, :], LOG2E, keep)
    dv = add_weighted_rows(dv, p, do, PRECISION)
    ds = p * (rows_by_rows(v, do, PRECISION) - delta[None, :])
    db, _ = _column_sums(db, db, ds, u_ptr, keys, queries, const.D, False)
    return db, dv


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def additive_backward_dbv_kernel(
    a_ptr, b_ptr, u_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, db_ptr, dv_ptr,
    v_strides, do_strides, db_strides, dv_strides, mask, H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """db and dv of a tile of keys, over the queries of all G heads. Grid as for dK/dV."""
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    H_k = H_q // G
    tile = key_tile(H_q, H_k, T_q, T_k, mask, BLOCK_N)
    b_ptr = _columns(b_ptr, tile.batch, tile.h_k, H_k, T_k, const.D)
    keys = _Columns(b_ptr, T_k, tile.k_pos, tile.valid)
    v = load_keys(v_ptr, v_strides, tile, const.BLOCK_DV, const.D_V, const)
    db = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    heads = tl.where(any_key(tile.valid), G, 0)
    for g in range(0, heads):
        h = tile.h_k * G + g
        a_head = _columns(a_ptr, tile.batch, h, H_q, T_q, const.D)
        do_head, do_stride = head_at(do_ptr, tile.batch, h, 0, do_strides, const)
        stats = (tile.batch * H_q + h).to(tl.int64) * T_q
        operands = (
            keys,
            v,
            u_ptr + h * const.D,
            a_head,
            do_head,
            do_stride,
            lse_ptr + stats,
            delta_ptr + stats,
        )
        db, dv = over_query_blocks(_grow_db, (db, dv), h, tile, operands, None, mask, None, const)
    store_keys(db_ptr, db_strides, tile, db, BLOCK_D, const.D, const)
    store_keys(dv_ptr, dv_strides, tile, dv, BLOCK_DV, const.D_V, const)


def _by_columns(x: Tensor) -> Tensor:
    """[B, H, T, D] as contiguous [B, H, D, T]."""
    return x.transpose(2, 3).contiguous()


def _tile(kernel: str, element_size: int, widest: int) -> TileConfig:
    """The tile of "forward", "da" or "dbv"; widest: the larger of BLOCK_D and BLOCK_DV.

    tanh dominates the time, so a tile is as large as the registers permit with the accumulators:
    one in forward, as wide as v; two in the others. IEEE fp32 products take registers too.
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
    and whole multiples of 16 bytes; u [H_q, D] contiguous. Only masks are read from options.
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
            constants(tile, D, D_v, v.dtype, v, o),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return o, lse


def launch_additive_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v; du fp32 [H_q, D].

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    other arguments as in `launch_additive_forward`, with its results.
    """
    v, o, do = aligned(v), aligned(o), aligned(do)
    B, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    dq, dk = empty_in_layout(q, H_q, T_q, D), empty_in_layout(k, H_k, T_k, D)
    dv = empty_in_layout(v, H_k, T_k, D_v)
    delta = torch.empty_like(lse)
    a, b = _by_columns(q), _by_columns(k)
    dims = (block_dim(D), block_dim(D_v))

    tile = _tile("da", v.element_size(), max(dims))
    du = torch.empty(blocks(T_q, tile.BLOCK_M), B, H_q, D, dtype=torch.float32, device=q.device)
    if programs := query_programs(options, q, tile.BLOCK_M):
        additive_backward_da_kernel[(programs,)](
            a, b, u, v, o, do, lse, dlse, dq, du, delta, *map(strides, (v, o, do, dq)),
            mask_for_queries(options, q, k, tile), *sizes(q, k),
            constants(tile, D, D_v, v.dtype, v, o, do, dq, dk, dv),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    tile = _tile("dbv", v.element_size(), max(dims))
    if programs := key_programs(options, k, tile.BLOCK_N):
        additive_backward_dbv_kernel[(programs,)](
            a, b, u, v, do, lse, delta, dk, dv, *map(strides, (v, do, dk, dv)),
            mask_for_keys(options, q, k, tile), *sizes(q, k),
            constants(tile, D, D_v, v.dtype, v, o, do, dq, dk, dv),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq, dk, dv, du.sum((0, 1))
