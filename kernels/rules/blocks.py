"""Loops of attention: over key blocks for a tile of queries, over query blocks for a tile of keys.

Full blocks, which need no mask, come first, then boundary blocks. BODY is the kernel's function for
one block. It takes the loop state, the block, its mask, the tile, and the kernel's operands, score
and constants, and returns the next state.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .mask import padded_keys, padding_words, valid_keys, visible
from .operands import Head, head_at
from .plans import full_block, key_plan, masked_block, query_plan
from .tile import (
    BatchRow,
    at_keys,
    at_queries,
    batch_row,
    clear_output,
    clear_unowned,
    ends_of,
    key_program,
    load_tile,
    memory_rows,
    query_program,
    query_rows,
    store_tile,
)


class QueryTile(NamedTuple):
    """A tile of queries of head h, which reads K/V head h_k.

    number: of the tile in its row. first, last: first and last existing row. rows, in_rows
    [BLOCK_M]: its rows, and which exist. batch, first_q, first_k: see `tile.memory_rows`.
    statistics: index of row 0 in tensors [B, H_q, T_q]. ends: see `tile.ends_of`.
    """

    row: Any
    number: Any
    h: Any
    h_k: Any
    H_q: Any
    first: Any
    last: Any
    rows: Any
    in_rows: Any
    batch: Any
    first_q: Any
    first_k: Any
    statistics: Any
    ends: Any


class KeyTile(NamedTuple):
    """A tile of keys of K/V head h_k, of H_k.

    number: of the tile in its row. first: its first key. k_pos, valid [BLOCK_N]: its keys, and
    which are visible to some query. batch, first_q, first_k: see `tile.memory_rows`. ends: see
    `tile.ends_of`.
    """

    row: Any
    number: Any
    h_k: Any
    H_k: Any
    H_q: Any
    first: Any
    k_pos: Any
    valid: Any
    batch: Any
    first_q: Any
    first_k: Any
    ends: Any


@triton.jit
def query_tile(H_q, G, T_q, T_k, mask, BLOCK_M: tl.constexpr):
    """The tile of this program. 1-D grid: see `tile.query_program`."""
    number, b, h, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    return query_tile_at(number, b, h, h_k, H_q, T_q, T_k, mask, BLOCK_M)


@triton.jit
def query_tile_at(number, b, h, h_k, H_q, T_q, T_k, mask, BLOCK_M: tl.constexpr):
    """Tile `number` of batch row b and head h."""
    row = batch_row(b, T_q, T_k, mask)
    batch, first_q, first_k = memory_rows(b, T_q, T_k, mask)
    first, last, rows, in_rows = query_rows(number, row.T_q, BLOCK_M)
    row = at_queries(row, first, mask)
    statistics = (batch * H_q + h).to(tl.int64) * T_q + first_q
    at = (batch, first_q, first_k)
    ends = ends_of(mask.cu_q_ptr, mask, T_q)
    return QueryTile(row, number, h, h_k, H_q, first, last, rows, in_rows, *at, statistics, ends)


@triton.jit
def key_tile(H_q, H_k, T_q, T_k, mask, BLOCK_N: tl.constexpr, parts=1):
    """The tile of this program. 1-D grid: see `tile.key_program`."""
    number, b, h_k = key_program(T_k, H_k, mask, BLOCK_N, parts)
    first = number * BLOCK_N
    row = at_keys(batch_row(b, T_q, T_k, mask), first, mask)
    batch, first_q, first_k = memory_rows(b, T_q, T_k, mask)
    k_pos = first + tl.arange(0, BLOCK_N)
    valid = valid_keys(k_pos, row, mask)
    ends = ends_of(mask.cu_k_ptr, mask, T_k)
    return KeyTile(row, number, h_k, H_k, H_q, first, k_pos, valid, batch, first_q, first_k, ends)


@triton.jit
def meeting_keys(tile, n_first, mask):
    """A tile of queries, with its row for the keys from n_first on: see `tile.at_keys`."""
    return QueryTile(at_keys(tile.row, n_first, mask), *tile[1:])


@triton.jit
def meeting_queries(tile, m_first, mask):
    """A tile of keys, with its row for the queries from m_first on: see `tile.at_queries`."""
    return KeyTile(at_queries(tile.row, m_first, mask), *tile[1:])


@triton.jit
def load_queries(ptr, strides, tile, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    """Load a tile of queries, [BLOCK_M, COLS], from a tensor like q; None without the tensor."""
    x = head_at(ptr, tile.batch, tile.h, tile.first_q, strides, const)
    return load_tile(x, tile.first, tile.in_rows, const.BLOCK_M, COLS, WIDTH)


@triton.jit
def store_queries(
    ptr, strides, tile, x, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr
):
    """Write x [BLOCK_M, COLS] where `load_queries` reads; 0 in rows of no packed sequence."""
    clear_output(ptr, strides, tl.arange(0, COLS), WIDTH, tile.H_q, tile.ends)
    rows = head_at(ptr, tile.batch, tile.h, tile.first_q, strides, const)
    store_tile(rows, tile.first, x, tile.in_rows, const.BLOCK_M, COLS, WIDTH)


@triton.jit
def store_statistic(ptr, tile, x, nothing):
    """Write x [BLOCK_M] to fp32 [B, H_q, T_q]; `nothing` in rows of no packed sequence."""
    if len(tile.ends) > 0:
        T_q = tile.ends[2]
        clear_unowned(ptr, nothing, tl.arange(0, 1), 1, T_q, 1, tile.H_q, tile.ends)
    tl.store(ptr + tile.statistics + tile.rows, x, mask=tile.in_rows)


@triton.jit
def key_head(ptr, strides, tile, const: tl.constexpr):
    """`operands.head` of a tensor like k, or None, for a tile of queries or of keys."""
    return head_at(ptr, tile.batch, tile.h_k, tile.first_k, strides, const)


@triton.jit
def load_keys(ptr, strides, tile, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    """Load a tile of keys, [BLOCK_N, COLS], from a tensor like k, or None; 0 for invalid rows."""
    x = key_head(ptr, strides, tile, const)
    return load_tile(x, tile.first, tile.valid, const.BLOCK_N, COLS, WIDTH)


@triton.jit
def store_keys(ptr, strides, tile, x, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    """Write x [BLOCK_N, COLS] where `load_keys` reads, if anywhere; 0 for invalid, unowned keys."""
    # In full blocks invalid keys were processed without a mask.
    if ptr is not None:
        clear_output(ptr, strides, tl.arange(0, COLS), WIDTH, tile.H_k, tile.ends)
        _store_keys_at(key_head(ptr, strides, tile, const), tile, x, COLS, WIDTH, const)


@triton.jit
def store_part(
    ptr, part, parts, T_k, tile, x, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr
):
    """`store_keys` to part `part` of `parts` in fp32 [B, H_k, parts, T_k, WIDTH]."""
    H_k = tile.H_k
    if len(tile.ends) > 0:
        cols = tl.arange(0, COLS)
        clear_unowned(ptr, 0.0, cols, WIDTH, T_k * WIDTH, WIDTH, H_k * parts, tile.ends)
    first = ((tile.batch * H_k + tile.h_k) * parts + part).to(tl.int64) * T_k + tile.first_k
    _store_keys_at(Head(ptr + first * WIDTH, WIDTH), tile, x, COLS, WIDTH, const)


@triton.jit
def _store_keys_at(rows, tile, x, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    x = tl.where(tile.valid[:, None], x, 0.0)
    in_keys = tile.k_pos < tile.row.T_k
    store_tile(rows, tile.first, x, in_keys, const.BLOCK_N, COLS, WIDTH)


@triton.jit
def over_key_blocks(BODY: tl.constexpr, state, tile, operands, mask, score, const: tl.constexpr):
    """Loop state after all key blocks of a tile of queries.

    BODY(state, n_first, valid, keep, tile, operands, score, const): valid [BLOCK_N], existing keys,
    and keep, visible pairs, are None for a full block. keep broadcasts to [BLOCK_M, BLOCK_N].
    """
    BLOCK_N: tl.constexpr = const.BLOCK_N
    HOLES: tl.constexpr = mask.padding_ptr is not None and mask.blocks_ptr is None
    row = tile.row
    if HOLES:
        row = BatchRow(
            row.b, row.T_q, row.T_k, row.offset, row.start, row.end, True, row.prefix, row.shift
        )
    full, boundary, plan = key_plan(tile.number, tile.first, tile.last, tile.h, row, mask, BLOCK_N)
    holed = 0
    if HOLES:
        # In otherwise full blocks, padding hides the same keys from all queries.
        holed = tl.where(tile.row.solid, 0, full)
        for i in range(0, holed):
            n_first = full_block(i, plan, mask) * BLOCK_N
            valid = padded_keys(padding_words(n_first, row, mask, BLOCK_N), BLOCK_N)
            here = meeting_keys(tile, n_first, mask)
            state = BODY(state, n_first, valid, valid[None, :], here, operands, score, const)
    for i in range(holed, full):
        n_first = full_block(i, plan, mask) * BLOCK_N
        here = meeting_keys(tile, n_first, mask)
        state = BODY(state, n_first, None, None, here, operands, score, const)
    for i in range(0, boundary):
        n_first = masked_block(i, plan, mask) * BLOCK_N
        here = meeting_keys(tile, n_first, mask)
        k_pos = n_first + tl.arange(0, BLOCK_N)
        words = None
        if HOLES:
            words = padding_words(n_first, row, mask, BLOCK_N)
        valid = valid_keys(k_pos, tile.row, mask, words)
        shown = valid
        if HOLES:
            # The row's limits include whether a key is past the end.
            shown = padded_keys(words, BLOCK_N)
        rows = tile.rows[:, None]
        # fp32 scores have another layout, which would need more registers.
        first = n_first if const.HALVES else None
        keep = visible(rows, k_pos[None, :], tile.h, here.row, mask, shown[None, :], first)
        state = BODY(state, n_first, valid, keep, here, operands, score, const)
    return state


@triton.jit
def over_query_blocks(
    BODY: tl.constexpr, state, h, tile, operands, there, mask, score, const: tl.constexpr
):
    """Loop state after all query blocks of head h of a tile of keys.

    BODY(state, m_first, in_rows, keep, h, tile, operands, score, const): in_rows [BLOCK_M],
    existing queries, and keep [BLOCK_N, BLOCK_M], visible pairs, are None for a full block. there:
    ANDed to every keep, [BLOCK_N, 1], or None.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    BLOCK_N: tl.constexpr = const.BLOCK_N
    k_first = tl.maximum(tile.first, tile.row.start)
    k_last = tl.minimum(tile.first + BLOCK_N, tile.row.end) - 1
    full, boundary, plan = query_plan(tile.number, k_first, k_last, h, tile.row, mask, BLOCK_M)
    for i in range(0, full):
        m_first = full_block(i, plan, mask) * BLOCK_M
        here = meeting_queries(tile, m_first, mask)
        state = BODY(state, m_first, None, there, h, here, operands, score, const)
    for i in range(0, boundary):
        m_first = masked_block(i, plan, mask) * BLOCK_M
        rows = m_first + tl.arange(0, BLOCK_M)
        here = meeting_queries(tile, m_first, mask)
        keep = visible(rows[None, :], tile.k_pos[:, None], h, here.row, mask, there)
        in_rows = rows < tile.row.T_q
        state = BODY(state, m_first, in_rows, keep, h, here, operands, score, const)
    return state
