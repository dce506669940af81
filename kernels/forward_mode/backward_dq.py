"""Backward of o and its tangent, dQ: one program per tile of queries.

For gradients do of o and h of `to`, with X and u as in `score_gradient.dual_gradient`:

    dq = scale * (X k + u tk)        dk = scale * (X^T q + u^T tq)        dv = W^T do + (W c)^T h

These are the ordinary backward at do, plus the derivative of the ordinary backward at h in the
direction of the tangents. The gradients of the tangents themselves are the ordinary backward at h.
With do = 0 they are also the second derivatives that a double backward needs.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.arguments import (
    aligned,
    block_dim,
    constants,
    query_programs,
    result_in_layout,
    rules,
    strides,
)
from ..launch.block_sparsity import launch_mask
from ..launch.launches import Launch, cached_plan
from ..rules.blocks import key_head, load_queries, over_key_blocks, query_tile, store_queries
from ..rules.product import add_weighted_rows, product_tangent, rows_by_rows
from ..rules.score import ScoreTangents, kept
from ..rules.score_gradient import DualRows, dual_gradient, load_lse, store_delta
from ..rules.tile import load_block, load_vector
from .backward_dkv import launch_dkv
from .tangent import (
    InputTangents,
    rows_of_tangent,
    score_tangent_strides,
    tile_of_tangents,
)

if TYPE_CHECKING:
    from ...options import Options


_Strides = namedtuple("_Strides", "q k v tq tk tv tbias trelative o to do h dq")


class _Operands(NamedTuple):
    """Rows of a tile of queries, do and tq or None, and heads of k, v and their tangents."""

    q: Any
    tq: Any
    do: Any
    h: Any
    rows: Any
    k: Any
    tk: Any
    v: Any
    tv: Any
    scores: Any


@triton.jit
def _grow_dq(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """dq += X k + u tk for one key block: see `blocks.over_key_blocks`."""
    PRECISION: tl.constexpr = const.PRECISION
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    k = load_block(operands.k, n_first, valid, BLOCK_N, BLOCK_D, const.D)
    v = load_block(operands.v, n_first, valid, BLOCK_N, BLOCK_DV, const.D_V)
    tk = load_block(operands.tk, n_first, valid, BLOCK_N, BLOCK_D, const.D)
    tv = load_block(operands.tv, n_first, valid, BLOCK_N, BLOCK_DV, const.D_V)
    s = rows_by_rows(operands.q, k, PRECISION)
    ts = product_tangent(operands.q, operands.tq, k, tk, PRECISION)
    e = rows_by_rows(operands.h, v, PRECISION)
    f = product_tangent(operands.h, operands.do, v, tv, PRECISION)
    survivors = None
    if score.dropout is not None:
        survivors = kept(tile.first, n_first, tile.h, tile.H_q, tile.row, score, const, False)
    rows, k_pos = tile.rows[:, None], (n_first + tl.arange(0, BLOCK_N))[None, :]
    of = operands.rows
    of = DualRows(of.lse[:, None], of.mu[:, None], of.delta[:, None], of.eta[:, None])
    _, _, X, u = dual_gradient(
        s, ts, e, f, of, survivors, rows, k_pos, tile.h, tile.row, keep, score, operands.scores
    )
    dq = add_weighted_rows(state[0], X, k, PRECISION)
    if tk is not None:
        dq = add_weighted_rows(dq, u, tk, PRECISION)
    return (dq,)


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def tangent_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, tbias_ptr, trelative_ptr, o_ptr, to_ptr, do_ptr,
    h_ptr, lse_ptr, mu_ptr, dlse_ptr, dmu_ptr, dq_ptr, delta_ptr, eta_ptr, strides, mask, score,
    H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the rows' delta and eta, which dK/dV reads. Grid as forward."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    k = key_head(k_ptr, strides.k, tile, const)
    v = key_head(v_ptr, strides.v, tile, const)
    tk = key_head(tk_ptr, strides.tk, tile, const)
    tv = key_head(tv_ptr, strides.tv, tile, const)
    q = load_queries(q_ptr, strides.q, tile, BLOCK_D, const.D, const)
    tq = load_queries(tq_ptr, strides.tq, tile, BLOCK_D, const.D, const)
    h = load_queries(h_ptr, strides.h, tile, BLOCK_DV, const.D_V, const)
    o = load_queries(o_ptr, strides.o, tile, BLOCK_DV, const.D_V, const)
    to = load_queries(to_ptr, strides.to, tile, BLOCK_DV, const.D_V, const)
    stats = tile.statistics + tile.rows
    delta = store_delta(o, h, dmu_ptr, delta_ptr, stats, tile.in_rows)
    eta = store_delta(to, h, dlse_ptr, None, stats, tile.in_rows)
    do = load_queries(do_ptr, strides.do, tile, BLOCK_DV, const.D_V, const)
    if do is not None:
        eta += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(eta_ptr + stats, eta, mask=tile.in_rows)
    lse = load_lse(lse_ptr + stats, tile.in_rows, score)
    mu = load_vector(mu_ptr + stats, tile.in_rows, 0.0)

    scores = ScoreTangents(tbias_ptr, strides.tbias, trelative_ptr, strides.trelative)
    operands = _Operands(q, tq, do, h, DualRows(lse, mu, delta, eta), k, tk, v, tv, scores)
    state = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    state = over_key_blocks(_grow_dq, state, tile, operands, mask, score, const)
    store_queries(dq_ptr, strides.dq, tile, state[0] * score.scale, BLOCK_D, const.D, const)


@cached_plan(13)
def _plan(options: Options, *tensors: Any) -> Launch:
    q, k, v, tq, tk, tv, tbias, trelative, o, to, do, h, dq, _dlse, _dmu = tensors
    tile = tile_of_tangents("backward_dq", q, v)
    # Four tiles of scores beside dQ fit into Blackwell's tensor memory.
    tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, 4096 // block_dim(q.shape[3])))
    programs = query_programs(options, q, tile.BLOCK_M)
    mask, tables = launch_mask(options, q, k, tile, of_keys=True) if programs else (None, None)
    return Launch(
        tangent_backward_dq_kernel,
        programs,
        tile,
        _Strides._make(
            (
                *map(strides, (q, k, v, tq, tk, tv)),
                *score_tangent_strides(tbias, trelative),
                *map(strides, (o, to, do, h, dq)),
            )
        ),
        *rules(options, mask, q, k),
        constants(tile, q.shape[3], v.shape[3], q.dtype, q, k, v, tq, tk, tv, o, to, do, h, dq),
        tables=tables,
    )


def launch_tangent_backward(
    do: Tensor | None, dlse: Tensor | None, h: Tensor, dmu: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, moved: InputTangents,
    o: Tensor, lse: Tensor, to: Tensor, mu: Tensor, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes (or fp32, by options) and memory orders of q, k, v; delta
    and eta fp32 like lse, for the gradient of sinks.

    do, dlse, h, dmu: gradients of o, lse, to, mu, results of `launch_forward` and `launch_tangent`;
    None: zero. Without relative keys, a second product and users' scores.
    """
    assert options.score_mod is None and options.relative_keys is None and options.key2 is None
    q, k, v, o, to = map(aligned, (q, k, v, o, to))
    tq, tk, tv, do = (rows_of_tangent(x, q.dtype) for x in (*moved[:3], do))
    h = aligned(h if h.stride(-1) == 1 else h.contiguous())
    tbias = moved.attn_bias
    trelative = None if moved.relative_bias is None else moved.relative_bias.contiguous()
    dq = result_in_layout(options, q, *q.shape[1:])
    delta, eta = torch.empty_like(lse), torch.empty_like(lse)
    inputs = (q, k, v, tq, tk, tv, tbias, trelative)
    launch = _plan(options, *inputs, o, to, do, h, dq, dlse, dmu)
    launch(options, *inputs, o, to, do, h, lse, mu, dlse, dmu, dq, delta, eta)
    dk, dv = launch_dkv(inputs, do, h, (lse, mu, delta, eta), options)
    return dq, dk, dv, delta, eta
