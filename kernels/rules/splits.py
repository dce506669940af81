"""Cache row, tile of queries and key blocks of a decoding program.

Rows of packed queries have any number of new tokens. A row with many has many tiles; all of them
split the row's keys into as many parts as its last tile, which sees the most keys. A launch serves
rows with numbers of tokens in a range, so that few tokens get a tile of few rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .integers import int32_within, value
from .plans import key_blocks
from .tile import FARTHEST, BatchRow, batch_row, rows_of_sequence


class Lengths(NamedTuple):
    """Lengths of the cache's rows, and the number of queries of each batch row.

    ptr: None if the mask has the lengths. cu_ptr: offsets [B + 1] of packed queries; the launch
    serves rows of `fewest` to `most` tokens.
    """

    ptr: Any
    new_ptr: Any
    starts_ptr: Any
    batch_index_ptr: Any
    rows: int | None  # this and the next fields in the form of `runtime_int`
    capacity: int | None
    cu_ptr: Any = None
    fewest: int | None = None
    most: int | None = None


class Plan(NamedTuple):
    """Plan to split keys into parts; integers in the form of `runtime_int`.

    Either the key blocks of all batch rows are divided into `shares`, or `shares` is 0 and each row
    has `splits` equal parts of the blocks that it needs. places: for packed queries, the capacity
    in parts.
    """

    shares: int | None
    splits: int | None
    places: int | None = None


class KeyPart(NamedTuple):
    """The work of one program: a tile of the queries of batch row b, and a part of its keys.

    row: facts of the batch row, which reads cache_row. count: its number of queries; packed ones
    start at `first`. split: index among the tile's `splits`. begin: index of the first split among
    the parts; for packed queries among the parts of split tiles, which end at `free`.
    """

    exists: Any
    b: Any
    cache_row: Any
    row: Any
    first: Any
    count: Any
    tile: Any
    split: Any
    splits: Any
    begin: Any
    free: Any


# Batch rows that a program examines at once to find its row.
_ROWS = tl.constexpr(128)
# Parts of fewer blocks cost more to merge than they save.
FEWEST_BLOCKS = tl.constexpr(4)


@triton.jit
def cache_row_of(b, T_q, lengths, mask):
    """The cache row of batch row b, and its facts as `BatchRow`."""
    if lengths.ptr is None:
        cache_row = b
        row = batch_row(b, T_q, value(lengths.capacity), mask)
    else:
        cache_row, row = _row_of_lengths(b, T_q, lengths)
    return cache_row, row


@triton.jit
def _row_of_lengths(b, T_q, lengths):
    """`cache_row_of` of a cache with lengths: the last query is at the last key."""
    cache_row = b
    if lengths.batch_index_ptr is not None:
        index = tl.load(lengths.batch_index_ptr + b)
        cache_row = int32_within(index, 0, value(lengths.rows) - 1)
    length = int32_within(tl.load(lengths.ptr + cache_row), -FARTHEST, FARTHEST)
    count = T_q
    if lengths.new_ptr is not None:
        count = int32_within(tl.load(lengths.new_ptr + b), 0, T_q)
    if lengths.cu_ptr is not None:
        _, count = rows_of_sequence(b, lengths.cu_ptr, T_q)
        T_q = count
    start = 0
    if lengths.starts_ptr is not None:
        start = int32_within(tl.load(lengths.starts_ptr + cache_row), 0, FARTHEST)
    # In a replayed graph, lengths may exceed the capacity.
    end = int32_within(length, 0, value(lengths.capacity))
    return cache_row, BatchRow(b, T_q, end, length - count, start, end, True, 0, 0)


@triton.jit
def tile_rows(tile, G, T_q, BLOCK_M: tl.constexpr):
    """The first and the last token of a tile of the G heads of T_q tokens."""
    return tile * BLOCK_M // G, (tl.minimum(tile * BLOCK_M + BLOCK_M, T_q * G) - 1) // G


@triton.jit
def _tiles(row, G, lengths, BLOCK_M: tl.constexpr):
    """Number of tiles of a packed row, 0 in another launch, and tokens of the last tile."""
    served = (row.T_q >= value(lengths.fewest)) & (row.T_q <= value(lengths.most))
    tiles = tl.where(served, tl.cdiv(row.T_q * G, BLOCK_M), 0)
    m_first, m_last = tile_rows(tl.maximum(tiles - 1, 0), G, row.T_q, BLOCK_M)
    return tiles, m_first, m_last


@triton.jit
def _visits(m_first, m_last, row, mask, BLOCK_N: tl.constexpr):
    """Number of key blocks that queries m_first..m_last need."""
    lo, _, _, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
    return kept + hi - lo


@triton.jit
def _work(
    rows, m_first, m_last, B, T_q, G, lengths, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Numbers of tiles [N] of batch rows [N], 0 past B, and of key blocks of each tile."""
    _, row = cache_row_of(tl.minimum(rows, B - 1), T_q, lengths, mask)
    tiles = (rows < B).to(tl.int32)
    if lengths.cu_ptr is not None:
        of_row, m_first, m_last = _tiles(row, G, lengths, BLOCK_M)
        tiles *= of_row
    return tiles, tl.where(tiles > 0, _visits(m_first, m_last, row, mask, BLOCK_N), 0)


@triton.jit
def _part_by_work(
    part, m_first, m_last, B, T_q, G, lengths, mask, shares, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`part_of` if all key blocks are divided into shares: a long row has many.

    For packed queries, also the number of parts of split tiles before the row, and in all.
    """
    total = 0
    for first in range(0, B, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        tiles, visits = _work(rows, m_first, m_last, B, T_q, G, lengths, mask, BLOCK_M, BLOCK_N)
        total += tl.sum(tiles * visits, 0)
    size = tl.maximum(tl.cdiv(total, shares), FEWEST_BLOCKS)
    b = 0
    begin = 0
    parts = 0
    before = 0
    several = 0
    for first in range(0, B, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        tiles, visits = _work(rows, m_first, m_last, B, T_q, G, lengths, mask, BLOCK_M, BLOCK_N)
        count = tiles * tl.maximum(tl.cdiv(visits, size), 1)
        behind = (rows < B) & (parts + tl.cumsum(count, 0) <= part)
        b += tl.sum(behind.to(tl.int32), 0)
        begin += tl.sum(tl.where(behind, count, 0), 0)
        parts += tl.sum(count, 0)
        if lengths.cu_ptr is not None:
            merged = tl.where(count > tiles, count, 0)
            before += tl.sum(tl.where(behind, merged, 0), 0)
            several += tl.sum(merged, 0)
    return b, begin, size, before, several


@triton.jit
def part_of(
    part, tile, B, T_q, G, lengths, mask, plan, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """`KeyPart` number `part` of a tile of all batch rows. Without SPLIT: batch row `part`."""
    m_first, m_last = tile_rows(tile, G, T_q, BLOCK_M)
    b = part
    begin = part
    size = 0
    if SPLIT:
        if (value(plan.shares) > 0) & (B == 1):
            # A single row needs no search.
            _, alone = cache_row_of(0, T_q, lengths, mask)
            visits = _visits(m_first, m_last, alone, mask, BLOCK_N)
            size = tl.maximum(tl.cdiv(visits, value(plan.shares)), FEWEST_BLOCKS)
            b = (part >= tl.maximum(tl.cdiv(visits, size), 1)).to(tl.int32)
            begin = b * part
        elif value(plan.shares) > 0:
            b, begin, size, _, _ = _part_by_work(
                part, m_first, m_last, B, T_q, G, lengths, mask, value(plan.shares), BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
        else:
            b = part // value(plan.splits)
            begin = b * value(plan.splits)
    exists = b < B
    b = tl.minimum(b, B - 1)
    cache_row, row = cache_row_of(b, T_q, lengths, mask)
    splits = splits_of(size, m_first, m_last, row, mask, plan, BLOCK_N)
    split = part - begin
    return KeyPart(exists, b, cache_row, row, 0, T_q, tile, split, splits, begin, 0)


@triton.jit
def packed_part(
    part, parts, B, total, G, lengths, mask, plan, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`KeyPart` number `part` of `parts` of packed queries, `total` in all; a row's last tile comes
    first.

    Its queries and places are within bounds, even with invalid offsets and lengths, and either all
    parts of a tile exist or none.
    """
    places = value(plan.places)
    b, first, size, begin, free = _part_by_work(
        part, 0, 0, B, total, G, lengths, mask, value(plan.shares), BLOCK_M, BLOCK_N
    )
    exists = b < B
    b = tl.minimum(b, B - 1)
    cache_row, row = cache_row_of(b, total, lengths, mask)
    token, _ = rows_of_sequence(b, lengths.cu_ptr, total)
    tiles, m_first, m_last = _tiles(row, G, lengths, BLOCK_M)
    splits = splits_of(size, m_first, m_last, row, mask, plan, BLOCK_N)
    tile = (part - first) // splits
    split = (part - first) % splits
    begin += tile * splits
    exists = exists & (tile < tiles) & ((splits == 1) | (begin + splits <= places))
    exists = exists & (first + (tile + 1) * splits <= parts)
    tile = tiles - 1 - tile
    return KeyPart(exists, b, cache_row, row, token, row.T_q, tile, split, splits, begin, free)


@triton.jit
def splits_of(size, m_first, m_last, row, mask, plan, BLOCK_N: tl.constexpr):
    """Number of splits of the keys of queries m_first..m_last of a row; size: of a share."""
    splits = value(plan.splits)
    if value(plan.shares) > 0:
        visits = _visits(m_first, m_last, row, mask, BLOCK_N)
        splits = tl.maximum(tl.cdiv(visits, size), 1)
    return splits


@triton.jit
def share(split, splits, m_first, m_last, row, mask, BLOCK_N: tl.constexpr, RANGES: tl.constexpr):
    """The key blocks of a split of a row, as visits: (first, last, full first, full last, lo,
    kept).

    Visits count the blocks that the rows need, those of `keep_first` and then lo..hi-1; lo and kept
    convert visits to blocks.
    """
    lo, full_lo, full_hi, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
    visits = kept + hi - lo
    each = visits // splits
    more = visits % splits
    first = split * each + tl.minimum(split, more)
    last = first + each + (split < more).to(tl.int32)
    full_first = kept
    full_last = kept
    if RANGES:
        full_first = full_lo - lo + kept
        full_last = full_hi - lo + kept
    full_first = tl.minimum(tl.maximum(full_first, first), last)
    full_last = tl.minimum(tl.maximum(full_last, full_first), last)
    return first, last, full_first, full_last, lo, kept
