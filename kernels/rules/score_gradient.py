"""The gradient of the scores of one tile, from which every other gradient follows."""

import triton
import triton.language as tl

from .product import rows_by_rows
from .relative import relative_products
from .score import dropped, gradient, kept, modified
from .softmax import weights
from .tile import load_vector


@triton.jit
def load_lse(pointers, in_rows, score):
    """lse of rows, inf for those that do not exist: their weights are 0 without a mask.

    So are those of a row that the score alone shows nothing.
    """
    lse = load_vector(pointers, in_rows, float("inf"))
    if score.hides is not None:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse


@triton.jit
def tile_gradient(
    q, do, lse, delta, k, v, query, vectors, m_first, n_first, keep, h, H_q, row, score,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dbias, ds) [BLOCK_M, BLOCK_N]: gradients of the score before the user's function, and of
    scale * q.k.

    q, do, lse, delta: rows from m_first; k, v: rows from n_first. keep: what the mask shows, or
    None where it shows all. query, vectors: for relative keys, see `relative`; vectors is None
    without them.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    rows = (m_first + tl.arange(0, BLOCK_M))[:, None]
    k_pos = (n_first + tl.arange(0, BLOCK_N))[None, :]
    s = rows_by_rows(q, k, PRECISION)
    if vectors is not None:
        s += relative_products(query, vectors, BLOCK_N, PRECISION)
    x, factor, before, capped = modified(s, rows, k_pos, h, row, score)
    p = weights(x, lse[:, None], factor)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    dp = rows_by_rows(do, v, PRECISION)
    if score.dropout is not None:
        dp = dropped(dp, kept(m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N), score)
    dx = p * (dp - delta[:, None])
    return gradient(dx, before, capped, rows, k_pos, h, row, keep, score)
