"""Gradients of relative biases and relative keys: sums of score gradients by distance p - j.

One program per tile of distances and query head. It visits every batch row and tile of queries in
order, recomputes the score gradients, and sums them by distance in registers: deterministic,
without a tensor of all pairs. Distances beyond the reach share an entry, so each tile keeps only
their sum.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import (
    UNBOUNDED,
    aligned,
    block_dim,
    blocks,
    constants,
    kernel_mask,
    rules,
    strides,
)
from .launch.tiles import lookup
from .rules.integers import value
from .rules.mask import valid_keys, visible
from .rules.operands import head_at
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import relative_query, skewed, vectors_at
from .rules.score import dropped, gradient, kept_at, modified
from .rules.score_gradient import QueryRows, load_lse
from .rules.softmax import weights
from .rules.tile import (
    FARTHEST,
    ORDERED,
    BatchRow,
    at_keys,
    at_queries,
    batch_row,
    load_block,
    load_vector,
    memory_rows,
)

if TYPE_CHECKING:
    from ..options import Options


_Strides = namedtuple("_Strides", "q k v do")


class _Head(NamedTuple):
    """Queries and keys of one head of a batch row, each a `operands.Head`, and where it begins."""

    h: Any
    H_q: Any
    q: Any
    do: Any
    k: Any
    v: Any
    batch: Any
    first_q: Any
    statistics: Any
    lse_ptr: Any
    delta_ptr: Any


@triton.jit
def _queries_of(d_first, row, mask, BLOCK: tl.constexpr):
    """Queries [first, last) of a row that may have a key at a distance in d_first + 0..BLOCK-1.

    Without positions, query i has key i + offset - d at distance d.
    """
    first = 0
    last = row.T_q
    if mask.q_positions_ptr is None:
        first = tl.maximum(row.start + d_first - row.offset, 0)
        last = tl.minimum(row.end + d_first + (BLOCK - 1) - row.offset, row.T_q)
    return first, tl.where(row.start < row.end, last, first)


@triton.jit
def _of_block(row, n_first, mask):
    """The row restricted to its keys in the block from n_first on."""
    row = at_keys(row, n_first, mask)
    start = tl.maximum(row.start, n_first)
    end = tl.minimum(row.end, n_first + ORDERED)
    return BatchRow(*row[:4], start, end, *row[6:])  # type: ignore[call-arg]


@triton.jit
def _meets(m_first, n_first, d_first, row, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Whether queries from m_first on and the block of keys may be at one of the distances."""
    nearest = m_first + row.offset - (n_first + row.shift)
    return (nearest + BLOCK_M > d_first) & (nearest - ORDERED < d_first + BLOCK - 1)


@triton.jit
def _gradient_by_distance(
    of, k, v, vectors, rows, d_first, h, H_q, row, mask, score, const: tl.constexpr
):
    """(dbias, ds) [BLOCK_M, BLOCK] of `tile_gradient`, with a column per distance.

    of: `QueryRows`. The keys of row 0 and column 0 are last in k and v, so that `skewed` sorts by
    distance.
    """
    BLOCK: tl.constexpr = const.BLOCK_N
    PRECISION: tl.constexpr = const.PRECISION
    distances = (d_first + tl.arange(0, BLOCK))[None, :]
    rows = rows[:, None]
    k_pos = rows + row.offset - row.shift - distances
    keep = valid_keys(k_pos, row, mask) & (rows < row.T_q)
    # Masks and scores may load only existing positions.
    k_pos = tl.minimum(tl.maximum(k_pos, 0), row.T_k - 1)
    keep = keep & visible(rows, k_pos, h, row, mask)
    s = skewed(rows_by_rows(of.q, k, PRECISION), BLOCK)
    if vectors is not None:
        s += rows_by_rows(of.query, vectors, PRECISION)
    x, factor, before, capped = modified(s, rows, k_pos, h, row, score)
    p = weights(x, of.lse[:, None], factor, keep)
    dp = skewed(rows_by_rows(of.do, v, PRECISION), BLOCK)
    if score.dropout is not None:
        dp = dropped(dp, kept_at(rows, k_pos, h, H_q, row, score), score)
    dx = p * (dp - of.delta[:, None])
    return gradient(dx, before, capped, rows, k_pos, h, row, keep, score)


@triton.jit
def _grow(dbias, dkeys, m_first, d_first, vectors, row, o, mask, score, const: tl.constexpr):
    """Add the queries from m_first on to the sums of the distances from d_first on."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK: tl.constexpr = const.BLOCK_N
    PRECISION: tl.constexpr = const.PRECISION
    W: tl.constexpr = triton.next_power_of_2(BLOCK_M + BLOCK - 1)
    rows = m_first + tl.arange(0, BLOCK_M)
    in_rows = rows < row.T_q
    n_first = m_first + row.offset - row.shift - d_first - (BLOCK - 1)
    valid = valid_keys(n_first + tl.arange(0, W), row, mask)
    stats = o.statistics + rows
    q = load_block(o.q, m_first, in_rows, BLOCK_M, const.BLOCK_D, const.D)
    query = relative_query(q, o.batch, o.h, o.first_q, m_first, in_rows, score, const)
    do = load_block(o.do, m_first, in_rows, BLOCK_M, const.BLOCK_DV, const.D_V)
    lse = load_lse(o.lse_ptr + stats, in_rows, score)
    delta = load_vector(o.delta_ptr + stats, in_rows, 0.0)
    k = load_block(o.k, n_first, valid, W, const.BLOCK_D, const.D)
    v = load_block(o.v, n_first, valid, W, const.BLOCK_DV, const.D_V)
    of = QueryRows(q, query, do, lse, delta)
    d_bias, ds = _gradient_by_distance(
        of, k, v, vectors, rows, d_first, o.h, o.H_q, row, mask, score, const
    )
    if score.relative_ptr is not None:
        dbias += tl.sum(d_bias, 0)
    if score.keys_ptr is not None:
        dkeys = add_weighted_rows(dkeys, tl.trans(ds), query, PRECISION)
    return dbias, dkeys


@triton.jit
def _store_bias(table_ptr, ends_ptr, sums, distances, reach, h, part):
    """Store sums within the reach in their entries, and the totals beyond it in `ends`."""
    entries = h * (2 * reach + 1) + distances + reach
    within = (distances >= -reach) & (distances <= reach)
    tl.store(table_ptr + entries, sums, mask=within)
    ends_ptr += 2 * part
    tl.store(ends_ptr, tl.sum(tl.where(distances < -reach, sums, 0.0), 0))
    tl.store(ends_ptr + 1, tl.sum(tl.where(distances > reach, sums, 0.0), 0))


@triton.jit
def _store_keys(
    table_ptr, ends_ptr, sums, distances, reach, h, part, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """`_store_bias` for vectors."""
    cols = tl.arange(0, BLOCK_D)
    entries = h * (2 * reach + 1) + distances + reach
    within = (distances >= -reach) & (distances <= reach)
    tl.store(
        table_ptr + entries.to(tl.int64)[:, None] * D + cols[None, :],
        sums,
        mask=within[:, None] & (cols < D)[None, :],
    )
    below = tl.sum(tl.where((distances < -reach)[:, None], sums, 0.0), 0)
    above = tl.sum(tl.where((distances > reach)[:, None], sums, 0.0), 0)
    ends_ptr += 2 * part.to(tl.int64) * D
    tl.store(ends_ptr + cols, below, mask=cols < D)
    tl.store(ends_ptr + D + cols, above, mask=cols < D)


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k", "rows_of_batch", "d_start"])
def attention_backward_relative_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dbias_ptr, dbias_ends_ptr, dkeys_ptr,
    dkeys_ends_ptr, starts_ptr, strides, mask, score, H_q, G, T_q, T_k, rows_of_batch, d_start,
    const: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N distances from d_start, or from where starts says, H_q)."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK: tl.constexpr = const.BLOCK_N
    D: tl.constexpr = const.D
    BLOCK_D: tl.constexpr = const.BLOCK_D
    if starts_ptr is None:
        d_first = d_start + tl.program_id(0) * BLOCK
    else:
        d_first = tl.load(starts_ptr + tl.program_id(0))
    h = tl.program_id(1)
    distances = d_first + tl.arange(0, BLOCK)
    dbias = tl.zeros([BLOCK], tl.float32)
    dkeys = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    vectors = None
    if score.keys_ptr is not None:
        vectors = vectors_at(distances, h, H_q, score, D, BLOCK_D)
    for b in range(0, rows_of_batch):
        row = batch_row(b, T_q, T_k, mask)
        batch, first_q, first_k = memory_rows(b, T_q, T_k, mask)
        q_head = head_at(q_ptr, batch, h, first_q, strides.q, const)
        k_head = head_at(k_ptr, batch, h // G, first_k, strides.k, const)
        v_head = head_at(v_ptr, batch, h // G, first_k, strides.v, const)
        do_head = head_at(do_ptr, batch, h, first_q, strides.do, const)
        stats = (batch * H_q + h).to(tl.int64) * T_q + first_q
        heads = (q_head, do_head, k_head, v_head)
        o = _Head(h, H_q, *heads, batch, first_q, stats, lse_ptr, delta_ptr)
        first, last = _queries_of(d_first, row, mask, BLOCK)
        for m_first in range(first, last, BLOCK_M):
            row_m = at_queries(row, m_first, mask)
            if mask.k_positions_ptr is not None:
                for n_first in range(0, row.T_k, ORDERED):
                    row_n = _of_block(row_m, n_first, mask)
                    if _meets(m_first, n_first, d_first, row_n, BLOCK_M, BLOCK):
                        dbias, dkeys = _grow(
                            dbias, dkeys, m_first, d_first, vectors, row_n, o, mask, score, const
                        )
            else:
                dbias, dkeys = _grow(
                    dbias, dkeys, m_first, d_first, vectors, row_m, o, mask, score, const
                )
    part = h * tl.num_programs(0) + tl.program_id(0)
    if score.relative_ptr is not None:
        _store_bias(dbias_ptr, dbias_ends_ptr, dbias, distances, value(score.reach), h, part)
    if score.keys_ptr is not None:
        dkeys, reach = dkeys * score.scale, value(score.keys_reach)
        _store_keys(dkeys_ptr, dkeys_ends_ptr, dkeys, distances, reach, h, part, D, BLOCK_D)


def launch_backward_relative(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Gradients of options.relative_bias and options.relative_keys, fp32 in their shapes, or empty.

    lse and delta: as for the other backward kernels. Tensors of query offsets, and positions, are
    read on the host, unless a window bounds the distances on both sides.
    """
    q, k, v, do = aligned(q), aligned(k), aligned(v), aligned(do)
    B, H_q, _, D = q.shape
    D_v = v.shape[3]
    dims = (block_dim(D), block_dim(D_v))
    tile = lookup("relative", q.element_size(), max(dims))
    d_start, d_end = _distances(options, q, k)
    tiles = blocks(max(d_end - d_start, 0), tile.BLOCK_N)
    starts = _starts_of_tiles(options, q, k, (d_start, d_end), tile.BLOCK_N)
    tiles = tiles if starts is None else starts.numel()
    bias = _sums(options.relative_bias, H_q, tiles, q)
    keys = _sums(options.relative_keys, H_q, tiles, q)
    if tiles and H_q:
        cu_seqlens = options.cu_seqlens_q
        attention_backward_relative_kernel[(tiles, H_q)](
            q,
            k,
            v,
            do,
            lse,
            delta,
            *bias,
            *keys,
            starts,
            _Strides(*map(strides, (q, k, v, do))),
            *rules(options, kernel_mask(options), q, k),
            B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            d_start,
            constants(tile, D, D_v, q.dtype, q, k, v, do, options.relative_query),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    dbias, dkeys = _folded(options.relative_bias, *bias), _folded(options.relative_keys, *keys)
    empty = lse.new_empty(0)
    return empty if dbias is None else dbias, empty if dkeys is None else dkeys


def _distances(options: Options, q: Tensor, k: Tensor) -> tuple[int, int]:
    """[start, end) of the distances p - j of visible pairs."""
    B, _, T_q, _ = q.shape
    T_k = k.shape[2]
    if min(B, T_q, T_k) == 0:
        return 0, 0
    start, end = -UNBOUNDED, UNBOUNDED
    if options.band is not None:
        left, right = options.band
        start = start if right is None else -right
        end = end if left is None else left + 1
    if options.cu_seqlens_q is not None:
        # The last query is at the last key of its sequence, which is no longer than all together.
        return max(start, 1 - T_q), min(end, T_k)
    in_order = options.query_offsets is None and options.q_positions is None
    if start > -UNBOUNDED and end < UNBOUNDED and not in_order:
        # Narrower bounds would synchronise with the device.
        return start, end
    if options.q_positions is not None and options.k_positions is not None:
        q_first, q_last = (int(x) for x in torch.aminmax(options.q_positions))
        k_first, k_last = (int(x) for x in torch.aminmax(options.k_positions))
        return max(start, q_first - k_last), min(end, q_last - k_first + 1)
    if options.query_offsets is None:
        assert options.query_offset is not None
        least = most = options.query_offset
    else:
        offsets = options.query_offsets.clamp(-FARTHEST.value, FARTHEST.value)
        least, most = (int(x) for x in torch.aminmax(offsets))
    return max(start, least - (T_k - 1)), min(end, most + T_q)


def _starts_of_tiles(
    options: Options, q: Tensor, k: Tensor, distances: tuple[int, int], BLOCK: int
) -> Tensor | None:
    """int32 [tiles]: starts of tiles with occurring distances; None: consecutive tiles.

    Rows with very different offsets have few of the distances between the extremes.
    """
    (B, _, T_q, _), T_k, (d_start, d_end) = q.shape, k.shape[2], distances
    if d_end - d_start <= 4 * B * (T_q + T_k):
        return None
    if options.q_positions is not None and options.k_positions is not None:
        # A block of queries and a block of keys span the distances of two tiles.
        q_block, k_block = (
            x.div(BLOCK, rounding_mode="floor").unique().long()
            for x in (options.q_positions, options.k_positions)
        )
        first = (q_block[:, None] - k_block - 1).flatten()
        count = 2
    elif options.query_offsets is not None:
        offsets = options.query_offsets.long().clamp(-FARTHEST.value, FARTHEST.value)
        first = (offsets - (T_k - 1)).div(BLOCK, rounding_mode="floor")
        count = blocks(T_q + T_k, BLOCK) + 1
    else:
        return None
    starts = (first[:, None] + torch.arange(count, device=first.device)).unique() * BLOCK
    return starts[(starts + BLOCK > d_start) & (starts < d_end)].int()


def _sums(table: Tensor | None, H_q: int, tiles: int, q: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate a gradient's sums: entries for every query head, and sums beyond the ends."""
    if table is None:
        return None, None
    entries = q.new_zeros(H_q, *table.shape[1:], dtype=torch.float32)
    ends = q.new_empty(H_q, tiles, 2, *table.shape[2:], dtype=torch.float32)
    return entries, ends


def _folded(table: Tensor | None, entries: Tensor | None, ends: Tensor | None) -> Tensor | None:
    """Gradient of the table: ends added to its end entries, and heads that share entries summed."""
    if table is None or entries is None or ends is None:
        return None
    below, above = ends.sum(1).unbind(1)
    entries[:, 0] += below
    entries[:, -1] += above
    heads = table.shape[0]
    return entries.unflatten(0, (heads, -1)).sum(1)
