"""Backward of o and its tangent, dK and dV: one program per tile of keys; see `backward_dq`.

A program loops over the G query heads of a K/V head, so dK and dV are never expanded.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from ..launch.arguments import (
    constants,
    key_programs,
    result_in_layout,
    rules,
    strides,
)
from ..launch.block_sparsity import launch_mask
from ..launch.launches import Launch, cached_plan
from ..rules.blocks import key_tile, load_keys, over_query_blocks, store_keys
from ..rules.mask import any_key
from ..rules.operands import head_at
from ..rules.product import add_weighted_rows, product_tangent, rows_by_rows
from ..rules.score import ScoreTangents, dropped, kept
from ..rules.score_gradient import DualRows, dual_gradient, load_lse
from ..rules.tile import load_block, load_vector
from .tangent import score_tangent_strides, tile_of_tangents

if TYPE_CHECKING:
    from ...options import Options

# q, k, v, tq, tk, tv, tbias, trelative
Inputs: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None,
]  # fmt: skip


_Strides = namedtuple("_Strides", "q k v tq tk tv tbias trelative do h dk dv")


class _Operands(NamedTuple):
    """A tile of k, v and their tangents or None, and a head of the queries' tensors.

    rows: pointers to the head's rows. dk_ptr, dv_ptr: None = gradient not computed.
    """

    k: Any
    tk: Any
    v: Any
    tv: Any
    q: Any
    tq: Any
    do: Any
    h: Any
    rows: Any
    dk_ptr: Any
    dv_ptr: Any
    scores: Any


@triton.jit
def _load_rows(pointers, rows, in_rows, score):
    """`DualRows` of rows; their weights are 0 if they do not exist."""
    lse = load_lse(pointers.lse + rows, in_rows, score)
    mu = load_vector(pointers.mu + rows, in_rows, 0.0)
    delta = load_vector(pointers.delta + rows, in_rows, 0.0)
    eta = load_vector(pointers.eta + rows, in_rows, 0.0)
    return DualRows(lse[None, :], mu[None, :], delta[None, :], eta[None, :])


@triton.jit
def _grow_dkv(state, m_first, in_rows, keep, h, tile, operands, score, const: tl.constexpr):
    """dk += X^T q + u^T tq and dv += W^T do + (W c)^T h: see `blocks.over_query_blocks`.

    Transposed: keys down, queries across.
    """
    PRECISION: tl.constexpr = const.PRECISION
    dk, dv = state
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    of = operands
    q = load_block(of.q, m_first, in_rows, BLOCK_M, BLOCK_D, const.D)
    dto = load_block(of.h, m_first, in_rows, BLOCK_M, BLOCK_DV, const.D_V)
    tq = load_block(of.tq, m_first, in_rows, BLOCK_M, BLOCK_D, const.D)
    do = load_block(of.do, m_first, in_rows, BLOCK_M, BLOCK_DV, const.D_V)
    rows = m_first + tl.arange(0, BLOCK_M)
    numbers = _load_rows(of.rows, rows, in_rows, score)
    s = rows_by_rows(of.k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    ts = product_tangent(of.k, of.tk, q, tq, PRECISION)
    e = rows_by_rows(of.v, dto, PRECISION)
    f = product_tangent(of.v, of.tv, dto, do, PRECISION)
    survivors = None
    if score.dropout is not None:
        survivors = tl.trans(kept(m_first, tile.first, h, tile.H_q, tile.row, score, const, False))
    across, down, row = rows[None, :], tile.k_pos[:, None], tile.row
    p, tp, X, u = dual_gradient(
        s, ts, e, f, numbers, survivors, across, down, h, row, keep, score, of.scores
    )
    if of.dv_ptr is not None:
        if score.dropout is not None:
            p, tp = dropped(p, survivors, score), dropped(tp, survivors, score)
        dv = add_weighted_rows(dv, tp, dto, PRECISION)
        if do is not None:
            dv = add_weighted_rows(dv, p, do, PRECISION)
    if of.dk_ptr is not None:
        dk = add_weighted_rows(dk, X, q, PRECISION)
        if tq is not None:
            dk = add_weighted_rows(dk, u, tq, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def tangent_backward_dkv_kernel(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, tbias_ptr, trelative_ptr, do_ptr, h_ptr,
    lse_ptr, mu_ptr, delta_ptr, eta_ptr, dk_ptr, dv_ptr, strides, mask, score, H_q, G, T_q, T_k,
    const: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all G heads. 1-D grid: see `key_program`.

    dk_ptr, dv_ptr: None = gradient not computed.
    """
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = key_tile(H_q, H_q // G, T_q, T_k, mask, BLOCK_N)
    k = load_keys(k_ptr, strides.k, tile, BLOCK_D, const.D, const)
    v = load_keys(v_ptr, strides.v, tile, BLOCK_DV, const.D_V, const)
    tk = load_keys(tk_ptr, strides.tk, tile, BLOCK_D, const.D, const)
    tv = load_keys(tv_ptr, strides.tv, tile, BLOCK_DV, const.D_V, const)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    scores = ScoreTangents(tbias_ptr, strides.tbias, trelative_ptr, strides.trelative)
    for g in range(0, tl.where(any_key(tile.valid), G, 0)):
        h = tile.h_k * G + g
        q = head_at(q_ptr, tile.batch, h, tile.first_q, strides.q, const)
        dto = head_at(h_ptr, tile.batch, h, tile.first_q, strides.h, const)
        tq = head_at(tq_ptr, tile.batch, h, tile.first_q, strides.tq, const)
        do = head_at(do_ptr, tile.batch, h, tile.first_q, strides.do, const)
        stats = (tile.batch * H_q + h).to(tl.int64) * T_q + tile.first_q
        rows = DualRows(lse_ptr + stats, mu_ptr + stats, delta_ptr + stats, eta_ptr + stats)
        operands = _Operands(k, tk, v, tv, q, tq, do, dto, rows, dk_ptr, dv_ptr, scores)
        dk, dv = over_query_blocks(_grow_dkv, (dk, dv), h, tile, operands, None, mask, score, const)
    store_keys(dk_ptr, strides.dk, tile, dk * score.scale, BLOCK_D, const.D, const)
    store_keys(dv_ptr, strides.dv, tile, dv, BLOCK_DV, const.D_V, const)


@cached_plan(12)
def _plan(options: Options, *tensors: Any) -> Launch:
    q, k, v, tq, tk, tv, tbias, trelative, do, h, dk, dv = tensors
    tile = tile_of_tangents("backward_dkv", q, v)
    programs = key_programs(options, k, tile.BLOCK_N)
    mask, tables = launch_mask(options, q, k, tile, of_keys=False) if programs else (None, None)
    return Launch(
        tangent_backward_dkv_kernel,
        programs,
        tile,
        _Strides._make(
            (
                *map(strides, (q, k, v, tq, tk, tv)),
                *score_tangent_strides(tbias, trelative),
                *map(strides, (do, h, dk, dv)),
            )
        ),
        *rules(options, mask, q, k),
        constants(tile, q.shape[3], v.shape[3], q.dtype, q, k, v, tq, tk, tv, do, h, dk, dv),
        tables=tables,
    )


def launch_dkv(
    inputs: Inputs,
    do: Tensor | None,
    h: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    options: Options,
) -> tuple[Tensor, Tensor]:
    """dk and dv in the shapes, dtypes (or fp32, by options) and memory orders of k and v.

    rows: lse, mu, delta, eta; see `backward_dq.launch_tangent_backward`.
    """
    q, k, v = inputs[:3]
    dk = result_in_layout(options, k, *k.shape[1:])
    dv = result_in_layout(options, v, *v.shape[1:])
    apart = tile_of_tangents("backward_dkv", q, v).apart
    for of_k, of_v in ((None, dv), (dk, None)) if apart else ((dk, dv),):
        launch = _plan(options, *inputs, do, h, of_k, of_v)
        launch(options, *inputs, do, h, *rows, of_k, of_v)
    return dk, dv
