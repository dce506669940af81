"""Second products added to q.k: with further keys, or with a vector per distance.

The latter are relative keys, indexed by the distance p - j.

A tile of queries and keys has only BLOCK_M + BLOCK_N - 1 distances. So the products of its queries
with the vectors are a matrix product, [BLOCK_M, W] ordered by distance, with W the next power of
two. `skewed` moves them to their keys' columns; `unskewed` moves the gradients of scores back
(Huang et al. 2018, arXiv 1809.04281, skew by padding and reshaping, which tiles do not permit).
"""

import triton
import triton.language as tl

from .integers import value
from .operands import head_at
from .product import rows_by_rows
from .score import shift_of
from .tile import load_block, load_tile


@triton.jit
def relative_query(q, batch, h, first_q, m_first, in_rows, score, const: tl.constexpr):
    """The query of further keys: q, if no other is given."""
    BLOCK_M: tl.constexpr = q.shape[0]
    query = q
    if score.query_ptr is not None:
        query = head_at(score.query_ptr, batch, h, first_q, score.query_strides, const)
        query = load_tile(query, m_first, in_rows, BLOCK_M, const.BLOCK_D2, const.D2)
    return query


@triton.jit
def further_keys(tile, m_first, n_first, valid, h, score, const: tl.constexpr):
    """Keys of a second product, [BLOCK_N, BLOCK_D2], or relative keys [W, BLOCK_D], or None.

    tile: of queries or of keys. h: query head. valid: which keys exist; None: all.
    """
    if score.key2_ptr is not None:
        own = h * value(score.key2_heads) // tile.H_q
        x = head_at(score.key2_ptr, tile.batch, own, tile.first_k, score.key2_strides, const)
        return load_block(x, n_first, valid, const.BLOCK_N, const.BLOCK_D2, const.D2)
    elif score.keys_ptr is not None:
        return vectors_of_tile(m_first, n_first, h, tile.H_q, tile.row, score, const)


@triton.jit
def further_products(query, keys, score, const: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: products of queries with `further_keys`."""
    PRECISION: tl.constexpr = const.PRECISION  # as an attribute of `const`, Triton 3.6 takes no str
    if score.key2_ptr is not None:
        products = rows_by_rows(query, keys, PRECISION)
    else:
        products = relative_products(query, keys, const.BLOCK_N, PRECISION)
    return products


@triton.jit
def vectors_at(distances, h, H_q, score, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Relative keys of head h, [distances, BLOCK_D], with distances clamped to the reach."""
    own = h * value(score.keys_heads) // H_q
    rows = 2 * value(score.keys_reach) + 1
    keys_ptr = score.keys_ptr + tl.cast(own, tl.int64) * rows * D
    cols = tl.arange(0, BLOCK_D)
    pointers = keys_ptr + shift_of(distances, score.keys_reach)[:, None] * D + cols[None, :]
    if D == BLOCK_D:
        vectors = tl.load(pointers)
    else:
        vectors = tl.load(pointers, mask=(cols < D)[None, :], other=0.0)
    return vectors


@triton.jit
def vectors_of_tile(m_first, n_first, h, H_q, row, score, const: tl.constexpr):
    """Relative keys [W, BLOCK_D] of a tile's distances, ascending."""
    W: tl.constexpr = triton.next_power_of_2(const.BLOCK_M + const.BLOCK_N - 1)
    smallest = m_first + row.offset - (n_first + row.shift) - (const.BLOCK_N - 1)
    return vectors_at(smallest + tl.arange(0, W), h, H_q, score, const.D, const.BLOCK_D)


@triton.jit
def relative_products(query, vectors, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: product of each query with the vector of its distance to each key."""
    return skewed(rows_by_rows(query, vectors, PRECISION), BLOCK_N)


@triton.jit
def skewed(x, COLS: tl.constexpr):
    """[ROWS, COLS] with x[r, r - c + COLS - 1] at [r, c].

    Converts columns by ascending distance to columns by key, and vice versa.
    """
    r = tl.arange(0, x.shape[0])[:, None]
    c = tl.arange(0, COLS)[None, :]
    return _take(x, r - c + (COLS - 1))


@triton.jit
def unskewed(x):
    """The transpose of `skewed`, [ROWS, W]: entries under their distances, else 0."""
    COLS: tl.constexpr = x.shape[1]
    W: tl.constexpr = triton.next_power_of_2(x.shape[0] + COLS - 1)
    r = tl.arange(0, x.shape[0])[:, None]
    c = r - tl.arange(0, W)[None, :] + (COLS - 1)
    wrapped = c & (COLS - 1)
    return tl.where(c == wrapped, _take(x, wrapped), 0.0)


@triton.jit
def _take(x, cols):
    """x[r, cols[r, c]] at [r, c]."""
    # In one dim: a two-dim gather compiles to a shuffle and select per element of a thread's row, a
    # one-dim gather to loads from shared memory. Eight rows are interleaved there, so that threads
    # in a matrix product's layout have few bank conflicts.
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    flat = x.reshape(ROWS // 8, 8, COLS).permute(0, 2, 1).reshape(ROWS * COLS)
    r = tl.arange(0, ROWS)[:, None]
    index = r // 8 * (8 * COLS) + cols * 8 + r % 8
    return tl.gather(flat, index.reshape(ROWS * cols.shape[1]), 0).reshape(ROWS, cols.shape[1])
