"""Which row of a cache a program of decoding reads, and which of its key blocks."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .integers import value
from .plans import key_blocks
from .tile import FARTHEST, Row, batch_row, int32_within


class Lengths(NamedTuple):
    """Lengths of the cache's rows, and by batch row the number of queries that are tokens.

    ptr: None where the mask places queries and keys.
    """

    ptr: Any
    new_ptr: Any
    starts_ptr: Any
    batch_index_ptr: Any
    rows: int | None  # this and what follows in the form of `runtime_int`
    capacity: int | None


class Plan(NamedTuple):
    """How keys are split into parts; integers in the form of `runtime_int`.

    Either the key blocks of all batch rows are divided into `shares`, or `shares` is 0 and each row
    has as many `splits`: of so many `blocks` of its positions, wherever they are, those that it
    needs, or, if that is 0, of equal parts of the blocks that it needs.
    """

    shares: int | None
    splits: int | None
    blocks: int | None


# Batch rows that a program looks at together to find its own.
_ROWS = tl.constexpr(128)
# Parts of fewer blocks take longer to merge than they save.
FEWEST_BLOCKS = tl.constexpr(4)


@triton.jit
def cache_row_of(b, T_q, lengths, mask):
    """The row of the cache that batch row b reads, and its facts as `Row`."""
    if lengths.ptr is None:
        cache_row = b
        row = batch_row(b, T_q, value(lengths.capacity), mask)
    else:
        cache_row, row = _row_of_lengths(b, T_q, lengths)
    return cache_row, row


@triton.jit
def _row_of_lengths(b, T_q, lengths):
    """`cache_row_of` of a cache that knows its lengths: the last query stands at the last key."""
    cache_row = b
    if lengths.batch_index_ptr is not None:
        index = tl.load(lengths.batch_index_ptr + b)
        cache_row = int32_within(index, 0, value(lengths.rows) - 1)
    length = int32_within(tl.load(lengths.ptr + cache_row), -FARTHEST, FARTHEST)
    count = T_q
    if lengths.new_ptr is not None:
        count = int32_within(tl.load(lengths.new_ptr + b), 0, T_q)
    start = 0
    if lengths.starts_ptr is not None:
        start = int32_within(tl.load(lengths.starts_ptr + cache_row), 0, FARTHEST)
    # A replayed graph may count past the end, where nothing is stored.
    end = int32_within(length, 0, value(lengths.capacity))
    return cache_row, Row(b, T_q, end, length - count, start, end, True, 0, 0)


@triton.jit
def _visits(m_first, m_last, row, mask, BLOCK_N: tl.constexpr):
    """How many key blocks queries m_first..m_last need."""
    lo, _, _, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
    return kept + hi - lo


@triton.jit
def _visits_of_rows(rows, m_first, m_last, B, T_q, lengths, mask, BLOCK_N: tl.constexpr):
    """`_visits` [N] of batch rows [N], 0 for those past B."""
    _, row = cache_row_of(tl.minimum(rows, B - 1), T_q, lengths, mask)
    return tl.where(rows < B, _visits(m_first, m_last, row, mask, BLOCK_N), 0)


@triton.jit
def _part_by_work(part, m_first, m_last, B, T_q, lengths, mask, shares, BLOCK_N: tl.constexpr):
    """`part_of` where all key blocks are divided into shares: a long row has many of them."""
    total = 0
    for first in range(0, B, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        visits = _visits_of_rows(rows, m_first, m_last, B, T_q, lengths, mask, BLOCK_N)
        total += tl.sum(visits, 0)
    size = tl.maximum(tl.cdiv(total, shares), FEWEST_BLOCKS)
    b = 0
    begin = 0
    parts = 0
    for first in range(0, B, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        visits = _visits_of_rows(rows, m_first, m_last, B, T_q, lengths, mask, BLOCK_N)
        count = tl.where(rows < B, tl.maximum(tl.cdiv(visits, size), 1), 0)
        behind = (rows < B) & (parts + tl.cumsum(count, 0) <= part)
        b += tl.sum(behind.to(tl.int32), 0)
        begin += tl.sum(tl.where(behind, count, 0), 0)
        parts += tl.sum(count, 0)
    return b, begin, size


@triton.jit
def part_of(part, m_first, m_last, B, T_q, lengths, mask, plan, BLOCK_N: tl.constexpr):
    """Batch row of a part (B: there is no such part), that row's first part, blocks of a part."""
    if value(plan.shares) > 0:
        b, begin, size = _part_by_work(
            part, m_first, m_last, B, T_q, lengths, mask, value(plan.shares), BLOCK_N
        )
    else:
        b = part // value(plan.splits)
        begin = b * value(plan.splits)
        size = value(plan.blocks)
    return b, begin, size


@triton.jit
def share(
    split, size, m_first, m_last, row, mask, plan, BLOCK_N: tl.constexpr, RANGES: tl.constexpr
):
    """The key blocks of one of a row's splits, as visits, and how many splits the row has:
    (first, last, full first, full last, lo, kept, splits).

    Visits count the blocks that the rows need, those of `keep_first` and then lo..hi-1; lo and kept
    turn visits into blocks. size: as `part_of` has it.
    """
    lo, full_lo, full_hi, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
    visits = kept + hi - lo
    splits = value(plan.splits)
    if value(plan.shares) > 0:
        splits = tl.maximum(tl.cdiv(visits, size), 1)
    each = visits // splits
    more = visits % splits
    first = split * each + tl.minimum(split, more)
    last = first + each + (split < more).to(tl.int32)
    if value(plan.blocks) > 0:
        start = _start(split, size, lo, kept)
        first = _visit(start, lo, hi, kept)
        last = _visit(start + size, lo, hi, kept)
    full_first = kept
    full_last = kept
    if RANGES:
        full_first = full_lo - lo + kept
        full_last = full_hi - lo + kept
    full_first = tl.minimum(tl.maximum(full_first, first), last)
    full_last = tl.minimum(tl.maximum(full_last, full_first), last)
    return first, last, full_first, full_last, lo, kept, splits


@triton.jit
def _start(split, size, lo, kept):
    """The first block of a part by positions. Parts between `kept` and lo are not counted: a ring
    holds the end of a row of any length.
    """
    of_kept = tl.cdiv(kept, size)
    passed_over = tl.where(split < of_kept, 0, tl.maximum(lo // size - of_kept, 0))
    return (split + passed_over) * size


@triton.jit
def _visit(block, lo, hi, kept):
    """The first visit that is not before a block."""
    behind = tl.minimum(tl.maximum(block, lo), hi) - lo + kept
    return tl.where(block < kept, block, behind)
