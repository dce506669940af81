"""Decoding: a few new queries per row and a long cache, whose keys are split among programs.

The G query heads of a K/V head, times the new tokens, are the rows of one tile, so that keys and
values are read once. Row r of a K/V head's tiles is token r // G of query head r % G. With G = 3
heads (a, b, c) and two new tokens, a tile of 16 rows holds

    a0 b0 c0 a1 b1 c1 . . . . . . . . . .

Each part of the keys writes its own (o, lse), which `combine` merges, or, if so tuned, the last
program of a tile to finish; without a split the kernel writes the result. The launch fixes the
number of parts, but each part finds its row and keys when it runs: a launch in a CUDA graph serves
growing lengths.

Packed queries, rows with any number of new tokens, use the same kernel: see `packed`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..combine import (
    EARLY_FROM,
    EARLY_UNTIL,
    PART_FACTS,
    PARTS_ALIGN,
    arrives_last,
    clear_places,
    merged_row,
    part_facts,
    place_packed,
)
from ..rules.codes import (
    add_weighted_groups,
    far_behind,
    largest_of,
    lift_of,
    queries_by_groups,
    queries_for_codes,
    scores_of_codes,
    scores_of_groups,
)
from ..rules.integers import value
from ..rules.mask import valid_keys, visible
from ..rules.operands import row_pointers
from ..rules.pages import Places, load_columns, load_groups, load_scales, load_slots, locate
from ..rules.product import add_weighted_rows, interleave, rows_by_rows
from ..rules.score import first_state, modified
from ..rules.softmax import finish, in_parts, online_step
from ..rules.splits import packed_part, part_of, share, tile_rows
from ..rules.tile import clear_unowned, load_at


class DecodeConstants(NamedTuple):
    """Compile-time constants: of the tile as in `tile.Constants`, and of the cache.

    Q_ALIGN, O_ALIGN: elements that divide the strides of q and o. SHARED: keys are the values'
    columns, loaded once, and then those of k_store, and queries have two parts. GROUPS, ONE_PAGE,
    ROW_BYTES: see `pages`. RANGES: see `splits.share`. PARTS: see `softmax.in_parts`. NVIDIA, INT8,
    RAISED: see `codes.numbers_of`. MERGED: the last program of a tile merges its parts, in so many
    columns; 0: another launch does. PACKED: the part determines row and tile.
    """

    D: int
    D_V: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    Q_ALIGN: int
    O_ALIGN: int
    SHARED: bool
    GROUPS: int
    ONE_PAGE: bool
    ROW_BYTES: int
    RANGES: bool
    PARTS: int
    PRECISION: str
    NVIDIA: int
    INT8: bool
    RAISED: bool
    MERGED: int
    PACKED: bool


class _Rows(NamedTuple):
    """Queries as `_load_queries` has them, their tokens and heads [M], and their `BatchRow`."""

    q: Any
    t: Any
    h: Any
    row: Any


class _Cache(NamedTuple):
    """The stored keys and values of a head of a row of the cache."""

    k_store: Any
    v_store: Any
    pages: Any
    row: Any
    head: Any


@triton.jit
def _take_block(state, n_first, valid, keep, rows, cache, score, const: tl.constexpr):
    """Take one key block into the state of the rows; valid = keep = None for a full block."""
    acc, m, l = state
    q = rows.q
    pages = cache.pages
    v_store = cache.v_store
    D_V: tl.constexpr = const.D_V
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    PRECISION: tl.constexpr = const.PRECISION
    CODES: tl.constexpr = v_store.scale_ptr is not None
    k_pos = n_first + tl.arange(0, const.BLOCK_N)
    if const.ONE_PAGE:
        page, slot = locate(cache.row, n_first, n_first >= 0, pages)
    else:
        page, slot = locate(cache.row, k_pos, k_pos >= 0 if valid is None else valid, pages)
    # Invalid table entries must not leave the pool.
    page = tl.minimum(tl.maximum(page, 0), value(pages.page_count) - 1)
    at = Places(pages, page, slot, cache.head, valid)
    unit = None
    lift = None
    if const.SHARED:
        if CODES:
            v, v_scale = load_groups(v_store, at, BLOCK_DV, D_V // const.GROUPS, const)
            s = scores_of_groups(q[0], v, v_scale, const)
        else:
            v = load_columns(v_store, at, BLOCK_DV, D_V, const)
            s = rows_by_rows(q[0], v, PRECISION)
        if const.D > D_V:
            s += _further_products(q[1], cache.k_store, at, const)
    else:
        k = load_slots(cache.k_store, at, const.BLOCK_D, const.D, const)
        if CODES:
            s = scores_of_codes(q, k, const)
            k_scale = load_scales(cache.k_store, at, const)
            if keep is None:
                unit = q.unit, k_scale[None, :]
            else:  # hidden pairs may have -inf, which must not be multiplied
                s = s * (q.unit * k_scale)[None, :]
            v_scale = (load_scales(v_store, at, const),)
        else:
            s = rows_by_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    if CODES:
        lift = lift_of(largest_of(v_scale, const.GROUPS))[None, :]
    t, h = rows.t[:, None], rows.h[:, None]
    s, factor, _, _ = modified(s, t, k_pos[None, :], h, rows.row, score, unit=unit)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None or score.hides is not None
    p, rescale, m, l = online_step(s, m, l, factor, MASKED, lift=lift)
    if not const.SHARED:
        v = load_slots(v_store, at, BLOCK_DV, D_V, const)
        if CODES:
            v = (v,)
    if CODES:
        DTYPE: tl.constexpr = q[0][0][0].dtype if const.SHARED else q.even.dtype
        acc = add_weighted_groups(acc, rescale, p, v, v_scale, DTYPE, const)
    else:
        acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, m, l


@triton.jit
def _further_products(q, store, at, const: tl.constexpr):
    """Products of queries and keys in the columns that are no values, numbers or codes."""
    PRECISION: tl.constexpr = const.PRECISION
    WIDTH: tl.constexpr = const.D - const.D_V
    if store.scale_ptr is None:
        k = load_columns(store, at, const.BLOCK_D, WIDTH, const)
        s = rows_by_rows(q, k, PRECISION)
    else:
        k = load_slots(store, at, const.BLOCK_D, WIDTH, const)
        s = scores_of_codes(q, k, const) * (q.unit * load_scales(store, at, const))[None, :]
    return s


@triton.jit
def _load_queries(pointers, in_rows, k_store, v_store, const: tl.constexpr):
    """The rows of queries that begin at pointers [M, 1], in the form that `_take_block` takes."""
    D: tl.constexpr = const.D
    D_V: tl.constexpr = const.D_V
    BLOCK_D: tl.constexpr = const.BLOCK_D
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    if const.SHARED:
        if v_store.scale_ptr is not None:
            of_values = queries_by_groups(pointers, in_rows, BLOCK_DV, D_V // const.GROUPS, const)
        else:
            cols = tl.arange(0, BLOCK_DV)[None, :]
            of_values = load_at(pointers + cols, in_rows, BLOCK_DV, D_V)
        q = (of_values, of_values)
        if D > D_V:
            if k_store.scale_ptr is not None:
                rest = queries_for_codes(pointers + D_V, in_rows, BLOCK_D, D - D_V, const.RAISED)
            else:
                cols = D_V + tl.arange(0, BLOCK_D)[None, :]
                rest = load_at(pointers + cols, in_rows, BLOCK_D, D - D_V)
            q = (of_values, rest)
    else:
        if v_store.scale_ptr is not None:
            q = queries_for_codes(pointers, in_rows, BLOCK_D, D, const.RAISED)
        else:
            q = load_at(pointers + tl.arange(0, BLOCK_D)[None, :], in_rows, BLOCK_D, D)
    return q


@triton.jit
def _merge_tile(
    o, lse_ptr, parts, arrived_ptr, place_b, one, h_k, H_q, G, T_q, tiles, const: tl.constexpr
):
    """Merge the parts of each row of a tile, if there are several and this program is the last."""
    BLOCK_M: tl.constexpr = const.BLOCK_M
    COLS: tl.constexpr = const.MERGED
    D_V: tl.constexpr = const.D_V
    if one.splits > 1:
        # Programs of a part: heads and tiles, each with a counter.
        programs = tiles * (H_q // G)
        counter = arrived_ptr + one.begin * programs + tl.program_id(0) % programs
        if arrives_last(counter, one.splits):
            cols = tl.arange(0, COLS)[None, :]
            facts = value(parts.strides[2]) - PART_FACTS
            step = value(parts.strides[0]).to(tl.int64)
            for i in range(0, tl.minimum(one.count * G - one.tile * BLOCK_M, BLOCK_M)):
                r = one.tile * BLOCK_M + i
                t, h = r // G, h_k * G + r % G
                if const.PACKED:
                    row_ptr = row_pointers(parts, one.begin, h_k, i, 1)
                else:
                    row_ptr = row_pointers(parts, one.begin, h, t, 1)
                result, lse = merged_row(row_ptr, step, facts, one.splits, D_V, COLS)
                out = row_pointers(o, place_b, h, one.first + t, 1)
                tl.store(out + cols, result.to(o.ptr.dtype.element_ty), mask=cols < D_V)
                place = (place_b * H_q + h).to(tl.int64) * T_q + one.first + t
                tl.store(lse_ptr + place + tl.arange(0, 1), lse)


@triton.jit(do_not_specialize=["B", "H_q", "G", "T_q", "tiles"])
def decode_kernel(
    q, o, lse_ptr, parts, arrived_ptr, k_store, v_store, pages, lengths, mask, score, plan,
    B, H_q, G, T_q, tiles, const: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows to a part of the keys. Programs: parts, K/V heads, tiles. For
    packed queries, T_q in all, the part determines row and tile.

    o and lse get final results, parts the results of one of several parts: see
    `combine.PART_FACTS`. Split packed queries use both, as rows have one part or several, and so
    does MERGED.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    BLOCK_DV: tl.constexpr = const.BLOCK_DV
    D_V: tl.constexpr = const.D_V
    GROUPS: tl.constexpr = const.GROUPS
    MERGED: tl.constexpr = const.MERGED
    PACKED: tl.constexpr = const.PACKED
    IN_PARTS: tl.constexpr = parts is not None
    tile = tl.program_id(0) % tiles
    h_k = tl.program_id(0) // tiles % (H_q // G)
    part = tl.program_id(0) // (tiles * (H_q // G))
    if PACKED:
        count = tl.num_programs(0) // (H_q // G)
        one = packed_part(part, count, B, T_q, G, lengths, mask, plan, BLOCK_M, BLOCK_N)
        ends = (lengths.cu_ptr, 4 * B + 3, T_q)
        cols = tl.arange(0, BLOCK_DV * GROUPS)
        clear_unowned(o.ptr, 0.0, cols, D_V, o.strides[1] >> 2, o.strides[2] >> 2, H_q, ends)
        clear_unowned(lse_ptr, float("-inf"), tl.arange(0, 1), 1, T_q, 1, H_q, ends)
        if IN_PARTS and MERGED == 0:
            clear_places(parts, part, count, one.free, h_k, value(plan.places), BLOCK_M)
    else:
        one = part_of(part, tile, B, T_q, G, lengths, mask, plan, BLOCK_M, BLOCK_N, IN_PARTS)
    if one.exists == 0:
        return
    b, cache_row, row, tile = one.b, one.cache_row, one.row, one.tile
    split, splits = one.split, one.splits
    m_first, m_last = tile_rows(tile, G, one.count, BLOCK_M)

    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = r < one.count * G
    # Missing rows repeat the last one, so that users' functions load valid elements.
    r = tl.minimum(r, one.count * G - 1)
    t = r // G
    h = h_k * G + r % G
    first, last, full_first, full_last, lo, kept = share(
        split, splits, m_first, m_last, row, mask, BLOCK_N, const.RANGES
    )
    # Offsets of the rows in q and o, and in parts.
    place_b, place_t = b, t
    part_h, part_t, in_part = h, t, in_rows
    if PACKED:
        place_b, place_t = 0, one.first + t
        part_h, part_t, in_part = h_k, tl.arange(0, BLOCK_M), in_rows & (splits > 1)
    elif MERGED > 0:
        in_part = in_rows & (splits > 1)
    if IN_PARTS and MERGED == 0:
        if PACKED:
            place_packed(parts, one.begin, split, splits, h_k, one.first * G + r, in_rows, BLOCK_M)
        else:
            facts = part_facts(parts, b, h, t)
            first_part = in_rows & (split == 0)
            tl.store(facts + 1, tl.cast(one.begin, tl.float32), mask=first_part)
            tl.store(facts + 2, tl.cast(splits, tl.float32), mask=first_part)
    CODES: tl.constexpr = v_store.scale_ptr is not None
    q_rows = row_pointers(q, place_b, h, place_t, const.Q_ALIGN)[:, None]
    rows = _Rows(_load_queries(q_rows, in_rows, k_store, v_store, const), t, h, row)
    cache = _Cache(k_store, v_store, pages, cache_row, h_k)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # The first split adds the sink of the row.
    m_sink, l_sink = first_state(h, m, l, score)
    m = tl.where(split == 0, m_sink, m)
    l = tl.where(split == 0, l_sink, l)
    if const.PARTS > 1:
        l = in_parts(l, const.PARTS)
    if CODES:
        m, l = far_behind(m, l)
        half = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc = ()
        for _ in tl.static_range(GROUPS):
            acc = acc + ((half, half),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    for i in range(full_first, full_last):
        n_first = (lo + i - kept) * BLOCK_N
        acc, m, l = _take_block((acc, m, l), n_first, None, None, rows, cache, score, const)
    before = full_first - first
    for i in range(0, before + last - full_last):
        visit = tl.where(i < before, first + i, full_last + i - before)
        n_first = tl.where(visit < kept, visit, lo + visit - kept) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        keep = valid[None, :] & visible(t[:, None], k_pos[None, :], h[:, None], row, mask)
        acc, m, l = _take_block((acc, m, l), n_first, valid, keep, rows, cache, score, const)

    if IN_PARTS and MERGED == 0 and const.NVIDIA >= EARLY_FROM and const.NVIDIA < EARLY_UNTIL:
        # `combine` may start now; it waits for the stores below.
        gdc_launch_dependents()
    for g in tl.static_range(GROUPS):
        tile_of_o = interleave(acc[g][0], acc[g][1]) if CODES else acc
        result, lse = finish(tile_of_o, m, l)
        within = tl.arange(0, BLOCK_DV) < D_V // GROUPS
        cols = g * (D_V // GROUPS) + tl.arange(0, BLOCK_DV)
        if o is not None:
            whole = in_rows
            if IN_PARTS:
                whole = in_rows & (splits == 1)
            tl.store(
                row_pointers(o, place_b, h, place_t, const.O_ALIGN)[:, None] + cols[None, :],
                result.to(o.ptr.dtype.element_ty),
                mask=whole[:, None] & within[None, :],
            )
            if g == 0:
                places = (place_b * H_q + h).to(tl.int64) * T_q + place_t
                tl.store(lse_ptr + places, lse, mask=whole)
        if IN_PARTS:
            # The output of a part without keys is not read.
            needed = in_part & (lse > float("-inf"))
            tl.store(
                row_pointers(parts, one.begin + split, part_h, part_t, PARTS_ALIGN)[:, None]
                + cols[None, :],
                result,
                mask=needed[:, None] & within[None, :],
            )
            if g == 0:
                tl.store(part_facts(parts, one.begin + split, part_h, part_t), lse, mask=in_part)
    if MERGED > 0:
        _merge_tile(o, lse_ptr, parts, arrived_ptr, place_b, one, h_k, H_q, G, T_q, tiles, const)
