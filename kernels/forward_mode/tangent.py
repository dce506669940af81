"""Tangents of o and lse, after the forward: one program per tile of queries, five products per
block.

With the tangent t of the scores, weights W = dropout(P), and lse's tangent mu:

    mu = sum_j P t + P_sink tsink        to = (W * t) v + W tv - mu o

Keys with a common component give t a large mean, which cancels between the terms of `to`, but only
after W * t has been rounded. So t is centred by its mean over the row's first block with a visible
key.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import tiles
from ..launch.arguments import (
    aligned,
    block_dim,
    broadcast_strides,
    constants,
    query_programs,
    rules,
    strides,
)
from ..launch.block_sparsity import launch_mask
from ..launch.launches import Launch, Stream, cached_plan
from ..launch.tiles import TileConfig
from ..rules.blocks import (
    key_head,
    load_queries,
    over_key_blocks,
    query_tile,
    store_queries,
    store_statistic,
)
from ..rules.integers import runtime_int
from ..rules.product import add_weighted_rows, product_tangent, rows_by_rows
from ..rules.score import ScoreTangents, dropped, kept, modified, tangent
from ..rules.score_gradient import load_lse
from ..rules.softmax import LOG2E, weights
from ..rules.tile import load_rows

if TYPE_CHECKING:
    from ...options import Options


class InputTangents(NamedTuple):
    """Tangents of q, k, v, attn_bias, relative_bias and sinks, in their shapes; None: zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    attn_bias: Tensor | None
    relative_bias: Tensor | None
    sinks: Tensor | None


_Strides = namedtuple("_Strides", "q k v tq tk tv tbias trelative o")


class _Operands(NamedTuple):
    """Queries, K/V, their tangents or None, lse, and the descriptors of k, v, tk and tv."""

    q: Any
    tq: Any
    k: Any
    tk: Any
    v: Any
    tv: Any
    lse: Any
    scores: Any
    k_desc: Any
    v_desc: Any
    tk_desc: Any
    tv_desc: Any


@triton.jit
def _tangent(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Loop body for one key block: see `blocks.over_key_blocks`.

    r: the sum of P (t - centre). seen: the sum of P. centre: -inf before the row's first visible
    key.
    """
    PRECISION: tl.constexpr = const.PRECISION
    acc, r, centre, seen = state
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    h = tile.h
    of = operands
    k = load_rows(of.k, of.k_desc, tile, n_first, valid, BLOCK_N, BLOCK_D, const.D)
    s = rows_by_rows(of.q, k, PRECISION)
    rows, k_pos = tile.rows[:, None], (n_first + tl.arange(0, BLOCK_N))[None, :]
    x, factor, before, capped = modified(s, rows, k_pos, h, tile.row, score)
    tk = load_rows(of.tk, of.tk_desc, tile, n_first, valid, BLOCK_N, BLOCK_D, const.D)
    ts = product_tangent(of.q, of.tq, k, tk, PRECISION)
    t = tangent(ts, x, before, capped, rows, k_pos, h, tile.row, keep, score, of.scores)
    p = weights(x, of.lse[:, None], factor, keep)
    pt = p * t
    here, moved = tl.sum(p, 1), tl.sum(pt, 1)
    centre = tl.where(
        (centre == float("-inf")) & (here > 0), moved / tl.where(here > 0, here, 1.0), centre
    )
    start = tl.where(centre == float("-inf"), 0.0, centre)
    r += moved - start * here
    seen += here
    pt -= start[:, None] * p
    if score.dropout is not None:
        survive = kept(tile.first, n_first, h, tile.H_q, tile.row, score, const, False)
        p, pt = dropped(p, survive, score), dropped(pt, survive, score)
    v = load_rows(of.v, of.v_desc, tile, n_first, valid, BLOCK_N, BLOCK_DV, const.D_V)
    acc = add_weighted_rows(acc, pt, v, PRECISION)
    if of.tv is not None:
        tv = load_rows(of.tv, of.tv_desc, tile, n_first, valid, BLOCK_N, BLOCK_DV, const.D_V)
        acc = add_weighted_rows(acc, p, tv, PRECISION)
    return acc, r, centre, seen


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_tangent_kernel(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, tbias_ptr, trelative_ptr, tsinks_ptr,
    o_ptr, lse_ptr, to_ptr, mu_ptr, k_desc, v_desc, tk_desc, tv_desc, strides, mask, score,
    H_q, G, T_q, T_k, const: tl.constexpr,
):  # fmt: skip
    """to and mu of a tile of queries, from o and lse."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    q = load_queries(q_ptr, strides.q, tile, const.BLOCK_D, const.D, const)
    k = key_head(k_ptr, strides.k, tile, const)
    v = key_head(v_ptr, strides.v, tile, const)
    tq = load_queries(tq_ptr, strides.tq, tile, const.BLOCK_D, const.D, const)
    tk = key_head(tk_ptr, strides.tk, tile, const)
    tv = key_head(tv_ptr, strides.tv, tile, const)
    lse = load_lse(lse_ptr + tile.statistics + tile.rows, tile.in_rows, score)
    scores = ScoreTangents(tbias_ptr, strides.tbias, trelative_ptr, strides.trelative)
    operands = _Operands(q, tq, k, tk, v, tv, lse, scores, k_desc, v_desc, tk_desc, tv_desc)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    state = (acc, zeros, zeros + float("-inf"), zeros)
    acc, r, centre, seen = over_key_blocks(_tangent, state, tile, operands, mask, score, const)

    centre = tl.where(centre == float("-inf"), 0.0, centre)
    mu = r + centre * seen  # seen: 1 minus the weight of the sink
    if tsinks_ptr is not None:
        weight = tl.exp2((tl.load(score.sinks_ptr + tile.h).to(tl.float32) - lse) * LOG2E)
        mu += weight * tl.load(tsinks_ptr + tile.h).to(tl.float32)
    o = load_queries(o_ptr, strides.o, tile, BLOCK_DV, const.D_V, const).to(tl.float32)
    to = acc + (centre - mu)[:, None] * o
    store_queries(to_ptr, strides.o, tile, to, BLOCK_DV, const.D_V, const)
    store_statistic(mu_ptr, tile, mu, 0.0)


def tile_of_tangents(
    kernel: Literal["backward_dq", "backward_dkv"], q: Tensor, v: Tensor
) -> TileConfig:
    """Tile of a kernel with similar register use and traffic, as there are four tensors of keys."""
    width = max(block_dim(q.shape[3]), block_dim(v.shape[3]))
    if width > 128 or q.element_size() > 2:
        return tiles.lookup("relative", q.element_size(), width)
    tile = tiles.lookup(kernel, q.element_size(), width, "heavy")
    return replace(tile, apart=kernel == "backward_dkv" and width > 64)


def score_tangent_strides(tbias: Tensor | None, trelative: Tensor | None) -> tuple[Any, Any]:
    """Strides in `ScoreTangents`."""
    of_bias = None if tbias is None else broadcast_strides(tbias)
    return of_bias, None if trelative is None else runtime_int(trelative.stride(0))


@cached_plan(9)
def _plan(options: Options, *tensors: Any) -> Launch:
    q, k, v, tq, tk, tv, tbias, trelative, _tsinks, o = tensors
    BLOCK_D, BLOCK_DV = block_dim(q.shape[3]), block_dim(v.shape[3])
    tile = tile_of_tangents("backward_dq", q, v)
    programs = query_programs(options, q, tile.BLOCK_M)
    mask, tables = launch_mask(options, q, k, tile, of_keys=True) if programs else (None, None)
    return Launch(
        attention_tangent_kernel,
        programs,
        tile,
        _Strides._make(
            (
                *map(strides, (q, k, v, tq, tk, tv)),
                *score_tangent_strides(tbias, trelative),
                strides(o),
            )
        ),
        *rules(options, mask, q, k),
        constants(tile, q.shape[3], v.shape[3], q.dtype, q, k, v, tq, tk, tv, o),
        streams=(
            Stream(1, k, tile.BLOCK_N, BLOCK_D),
            Stream(2, v, tile.BLOCK_N, BLOCK_DV),
            Stream(4, tk, tile.BLOCK_N, BLOCK_D),
            Stream(5, tv, tile.BLOCK_N, BLOCK_DV),
        ),
        tables=tables,
    )


def rows_of_tangent(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """An `aligned` tangent, as torch may make one with any strides and dtype."""
    if x is None:
        return None
    return aligned((x if x.stride(-1) == 1 else x.contiguous()).to(dtype))


def launch_tangent(
    q: Tensor, k: Tensor, v: Tensor, moved: InputTangents, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Tangents of o, in its dtype and memory order, and of lse, fp32 [B, H_q, T_q].

    Arguments and results of `forward.launch_forward`, without relative keys. Rows without keys have
    tangents of 0.
    """
    q, k, v = aligned(q), aligned(k), aligned(v)
    tq, tk, tv = (rows_of_tangent(x, q.dtype) for x in moved[:3])
    tbias = moved.attn_bias
    trelative, tsinks = (None if x is None else x.contiguous() for x in moved[4:])
    to, mu = torch.empty_like(o), torch.empty_like(lse)
    tensors = (q, k, v, tq, tk, tv, tbias, trelative, tsinks)
    _plan(options, *tensors, o)(options, *tensors, o, lse, to, mu)
    return to, mu
