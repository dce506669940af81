"""Plans: key blocks for a tile of queries, query blocks for a tile of keys.

`key_plan` and `query_plan` apply the rule of `mask` to tiles: which blocks are full (nothing is
masked) and which are boundary blocks. If ranges do not suffice (a stride, documents, a mask tensor,
a mask_mod, positions), a table of blocks is used, which `block_sparsity` makes with `visible`.
"""

import triton
import triton.language as tl

from .integers import value


@triton.jit
def _blocks(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Block numbers of positions: visible [lo, hi), and inside it full [full_lo, full_hi)."""
    first = tl.maximum(first, 0)
    lo = first // BLOCK
    hi = tl.where(last > first, tl.cdiv(last, BLOCK), lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_first, 0), BLOCK), lo), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def key_blocks(m_first, m_last, row, mask, BLOCK_N: tl.constexpr):
    """Key blocks of queries m_first..m_last: (lo, full_lo, full_hi, hi, kept).

    Blocks lo..hi-1, and 0..kept-1 before them, contain every key visible to one of these queries.
    In full_lo..full_hi-1 every query sees every key; the others are boundary blocks. Documents,
    mask tensors and functions are left to `block_sparsity`, as are unordered positions.
    """
    ORDERED: tl.constexpr = mask.q_positions_ptr is None
    end = row.end
    q_first = m_first + row.offset
    q_last = m_last + row.offset
    if mask.cu_q_ptr is not None:
        # A tile past the end of its packed sequence.
        end = tl.where(m_first <= m_last, end, row.start)
    first = row.start
    last = end
    full_first = row.start
    full_last = tl.where(row.solid, end, 0)
    if mask.tree_ptr is not None:
        full_last = tl.minimum(full_last, row.offset)
    if mask.ordered is not None:
        full_last = 0
    if mask.stride is None and ORDERED:
        if mask.left is not None:
            first = tl.maximum(first, q_first - value(mask.left))
            full_first = tl.maximum(full_first, q_last - value(mask.left))
        if mask.right is not None:
            last = tl.minimum(last, q_last + value(mask.right) + 1)
            full_last = tl.minimum(full_last, q_first + value(mask.right) + 1)
    known_end = end
    if mask.causal is not None and ORDERED:
        last = tl.minimum(last, tl.maximum(q_last + 1, row.prefix))
        full_last = tl.minimum(full_last, tl.maximum(q_first + 1, row.prefix))
        known_end = tl.minimum(end, tl.maximum(q_last + 1, row.prefix))
    lo, full_lo, full_hi, hi = _blocks(first, last, full_first, full_last, BLOCK_N)
    kept = 0
    if mask.keep_first is not None and ORDERED:
        known_end = tl.maximum(tl.minimum(known_end, value(mask.keep_first)), 0)
        kept = tl.cdiv(known_end, BLOCK_N)
        # Kept blocks that overlap the range become part of it.
        hi = tl.where(hi > lo, tl.maximum(hi, kept), hi)
        kept = tl.where(hi > lo, tl.minimum(kept, lo), kept)
    return lo, full_lo, full_hi, hi, kept


@triton.jit
def query_blocks(k_first, k_last, row, mask, BLOCK_M: tl.constexpr):
    """Query blocks of the keys k_first..k_last: the inverse of `key_blocks`, without its `kept`.

    In rows, not positions: row i is at i + offset. Invisible keys do not matter, as they affect
    only their own rows of dK and dV, which are written as 0.
    """
    ORDERED: tl.constexpr = mask.q_positions_ptr is None
    first = 0
    last = row.T_q
    full_first = 0
    full_last = row.T_q
    if mask.ordered is not None:
        full_last = 0
    if mask.stride is None and ORDERED:
        if mask.right is not None:
            first = tl.maximum(first, k_first - value(mask.right) - row.offset)
            full_first = tl.maximum(full_first, k_last - value(mask.right) - row.offset)
        if mask.left is not None:
            last = tl.minimum(last, k_last + value(mask.left) - row.offset + 1)
            full_last = tl.minimum(full_last, k_first + value(mask.left) - row.offset + 1)
    if mask.keep_first is not None and ORDERED:
        first = tl.where(k_first < value(mask.keep_first), 0, first)
        last = tl.where(k_first < value(mask.keep_first), row.T_q, last)
    if mask.causal is not None and ORDERED:
        first = tl.where(k_first < row.prefix, first, tl.maximum(first, k_first - row.offset))
        in_prefix = k_last < row.prefix
        full_first = tl.where(in_prefix, full_first, tl.maximum(full_first, k_last - row.offset))
    return _blocks(first, last, full_first, full_last, BLOCK_M)


@triton.jit
def boundary_block(i, lo, full_lo, full_hi):
    """Number of the i-th boundary block: first those before the full blocks, then those after."""
    before = full_lo - lo
    return tl.where(i < before, lo + i, full_hi + i - before)


@triton.jit
def _plan_by_table(tile, b, h, mask):
    """Plan of a tile from a table: full blocks from the front of its list, others from the end.

    table_strides: rows of the table to the next b and h, and blocks in a row.
    """
    table_row = tl.cast(b, tl.int64) * value(mask.table_strides[0])
    table_row += tl.cast(h, tl.int64) * value(mask.table_strides[1]) + tile
    counts_ptr = mask.counts_ptr + 2 * table_row
    blocks_ptr = mask.blocks_ptr + table_row * value(mask.table_strides[2])
    plan = (blocks_ptr, blocks_ptr, blocks_ptr, blocks_ptr)
    return tl.load(counts_ptr), tl.load(counts_ptr + 1), plan


@triton.jit
def _plan_by_ranges(lo, full_lo, full_hi, hi, kept):
    full = full_hi - full_lo
    boundary = kept + (full_lo - lo) + (hi - full_hi)
    return full, boundary, (lo, full_lo, full_hi, kept)


@triton.jit
def key_plan(tile, m_first, m_last, h, row, mask, BLOCK_N: tl.constexpr):
    """Key blocks of a query tile: (number of full blocks, of boundary blocks, plan)."""
    if mask.blocks_ptr is not None:
        plan = _plan_by_table(tile, row.b, h, mask)
    else:
        lo, full_lo, full_hi, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
        plan = _plan_by_ranges(lo, full_lo, full_hi, hi, kept)
    return plan


@triton.jit
def query_plan(tile, k_first, k_last, h, row, mask, BLOCK_M: tl.constexpr):
    """Query blocks of head h of a key tile, as `key_plan`."""
    if mask.blocks_ptr is not None:
        plan = _plan_by_table(tile, row.b, h, mask)
    else:
        lo, full_lo, full_hi, hi = query_blocks(k_first, k_last, row, mask, BLOCK_M)
        plan = _plan_by_ranges(lo, full_lo, full_hi, hi, 0)
    return plan


@triton.jit
def full_block(i, plan, mask):
    """Number of the i-th full block of a plan."""
    block = plan[1] + i
    if mask.blocks_ptr is not None:
        block = tl.load(block)
    return block


@triton.jit
def masked_block(i, plan, mask):
    """Number of the i-th boundary block of a plan."""
    lo, full_lo, full_hi, kept = plan
    if mask.blocks_ptr is not None:
        block = tl.load(lo + value(mask.table_strides[2]) - 1 - i)
    else:
        block = boundary_block(i - kept, lo, full_lo, full_hi)
        if mask.keep_first is not None:
            block = tl.where(i < kept, i, block)
    return block
