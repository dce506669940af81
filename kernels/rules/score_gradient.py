"""Gradient of a tile's scores, on which all other gradients depend."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .product import rows_by_rows
from .relative import further_products
from .score import dropped, gradient, kept, modified, tangent
from .softmax import weights
from .tile import load_vector


@triton.jit
def load_lse(pointers, in_rows, score, NOWHERE: tl.constexpr = float("inf")):
    """lse of rows, NOWHERE for nonexistent rows, whose weights are then 0 without a mask."""
    # The weights of rows whose scores are all -inf are 0 too.
    lse = load_vector(pointers, in_rows, NOWHERE)
    if score.hides is not None:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse


@triton.jit
def store_delta(o, do, dlse_ptr, delta_ptr, stats, in_rows):
    """delta = rowsum(o * do) - dlse of a tile's rows, written at `stats` if given delta_ptr."""
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= load_vector(dlse_ptr + stats, in_rows, 0.0)
    if delta_ptr is not None:
        tl.store(delta_ptr + stats, delta, mask=in_rows)
    return delta


class QueryRows(NamedTuple):
    """Operands from a tile's queries for the gradients of its scores.

    q, do [BLOCK_M, ...], lse, delta [BLOCK_M]; query: of further keys.
    """

    q: Any
    query: Any
    do: Any
    lse: Any
    delta: Any


@triton.jit
def score_gradient(rows, k, v, further, bias, n_first, keep, tile, score, const: tl.constexpr):
    """dx [BLOCK_M, BLOCK_N], the gradient of the score after the user's function; the score before
    it, and the softcapped one.

    k, v: rows from n_first. keep: visible pairs, or None = all. further: see
    `relative.further_keys`. bias: see `score.modified`.
    """
    PRECISION: tl.constexpr = const.PRECISION
    h = tile.h
    row = tile.row
    k_pos = (n_first + tl.arange(0, const.BLOCK_N))[None, :]
    s = rows_by_rows(rows.q, k, PRECISION)
    if further is not None:
        s += further_products(rows.query, further, score, const)
    x, factor, before, capped = modified(s, tile.rows[:, None], k_pos, h, row, score, bias)
    p = weights(x, rows.lse[:, None], factor, keep)
    dp = rows_by_rows(rows.do, v, PRECISION)
    if score.dropout is not None:
        dp = dropped(dp, kept(tile.first, n_first, h, tile.H_q, row, score, const), score)
    return p * (dp - rows.delta[:, None]), before, capped


@triton.jit
def tile_gradient(rows, k, v, further, bias, n_first, keep, tile, score, const: tl.constexpr):
    """(dbias, ds) [BLOCK_M, BLOCK_N]: gradients of the score before the user's function and of
    scale * q.k; arguments as for `score_gradient`.
    """
    dx, before, capped = score_gradient(
        rows, k, v, further, bias, n_first, keep, tile, score, const
    )
    k_pos = (n_first + tl.arange(0, const.BLOCK_N))[None, :]
    return gradient(dx, before, capped, tile.rows[:, None], k_pos, tile.h, tile.row, keep, score)


class DualRows(NamedTuple):
    """Numbers of rows for `dual_gradient`, which broadcast against scores.

    mu: the tangent of lse. delta = h.o - dmu, eta = do.o + h.to - dlse: see there.
    """

    lse: Any
    mu: Any
    delta: Any
    eta: Any


@triton.jit
def dual_gradient(s, ts, e, f, numbers, survivors, rows, k_pos, h, row, keep, score, tangents):
    """(p, p c, X, u) of a tile of either orientation: weights, their tangents, and gradients of
    scale * q.k and of its tangent, for gradients do, h of o, to and dlse, dmu of lse, mu.

        t: tangent of x     c = t - mu     e = h.v     f = do.v + h.tv     (after dropout)
        u = p (e - delta)               gradient of t
        X = p (f - eta + c (e - delta))    gradient of x

    It is the gradient in dual numbers, as u + eps X, if t, f, eta are tangents of x, e, delta. s,
    ts: q.k and its tangent. survivors: of dropout, or None. Not for users' functions, as X needs
    their second derivative.
    """
    x, factor, before, capped = modified(s, rows, k_pos, h, row, score)
    t = tangent(ts, x, before, capped, rows, k_pos, h, row, keep, score, tangents)
    p = weights(x, numbers.lse, factor, keep)
    if survivors is not None:
        e, f = dropped(e, survivors, score), dropped(f, survivors, score)
    c = t - numbers.mu
    e -= numbers.delta
    u = p * e
    X = p * (f - numbers.eta + c * e)
    if score.softcap is not None:
        ratio = capped * (1.0 / score.softcap)
        slope = 1 - ratio * ratio
        X = slope * (X - (2 / score.softcap) * ratio * (ts * score.scale) * u)
        u = slope * u
    return p, p * c, X, u
