"""Which keys a query sees: the rule, and the blocks that follow from it.

Query i of batch row b stands at position p = i + offset[b] among the keys. It sees key j iff

    p - left <= j <= p + right      the band; causal is right = 0, a side left out is unbounded
    start <= j < end                the keys of the row: its length, the extent of its padding mask
    padding[b, j]                   where a padding mask is given

`visible` states the rule for elements of any shape: forward passes columns of queries against
rows of keys, dK/dV the transpose. `key_blocks` and `query_blocks` state it for tiles, in both
directions.
"""

import triton
import triton.language as tl


@triton.jit
def batch_row(b, T_k, query_offset, offsets_ptr, lengths_ptr, extents_ptr):
    """Batch row b: the position of query 0, the keys [start, end), and if those have no holes."""
    offset = query_offset
    start = 0
    end = T_k
    solid = True
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + b).to(tl.int32)
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b)
        end = tl.minimum(tl.maximum(length, 0), T_k).to(tl.int32)
    if extents_ptr is not None:
        start = tl.load(extents_ptr + 3 * b)
        end = tl.minimum(end, tl.load(extents_ptr + 3 * b + 1))
        solid = tl.load(extents_ptr + 3 * b + 2) == 0
    return offset, start, end, solid


@triton.jit
def valid_keys(k_pos, b, start, end, padding_ptr, padding_stride):
    """True where a key of the row exists: some query may see it. Others are never loaded."""
    valid = (k_pos >= start) & (k_pos < end)
    if padding_ptr is not None:
        row_ptr = padding_ptr + tl.cast(b, tl.int64) * padding_stride
        valid = valid & (tl.load(row_ptr + k_pos, mask=valid, other=0) != 0)
    return valid


@triton.jit
def visible(q_pos, k_pos, left, right):
    """True where the query at q_pos sees the key at k_pos, as far as the band goes."""
    keep = q_pos + k_pos == k_pos + q_pos
    if right is not None:
        keep = keep & (k_pos - q_pos <= right)
    if left is not None:
        keep = keep & (q_pos - k_pos <= left)
    return keep


@triton.jit
def any_key(valid):
    """Whether a key of the block exists."""
    return tl.max(valid.to(tl.int32), 0) != 0


@triton.jit
def worth_loading(valid, padding_ptr):
    """False for a boundary block that a padding mask empties; nothing else can, inside lo..hi."""
    found = True
    if padding_ptr is not None:
        found = any_key(valid)
    return found


@triton.jit
def _blocks(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Positions to block numbers: visible [lo, hi), and inside it full [full_lo, full_hi)."""
    first = tl.maximum(first, 0)
    lo = first // BLOCK
    hi = tl.where(last > first, tl.cdiv(last, BLOCK), lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_first, 0), BLOCK), lo), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def key_blocks(q_first, q_last, start, end, solid, left, right, BLOCK_N: tl.constexpr):
    """Key blocks of the queries at positions q_first..q_last: (lo, full_lo, full_hi, hi).

    Blocks lo..hi-1 hold every key that one of these queries sees. In full_lo..full_hi-1 every
    query sees every key, so nothing is masked there; the blocks on either side are boundary blocks.
    """
    first = start
    last = end
    full_first = start
    full_last = tl.where(solid, end, 0)
    if left is not None:
        first = tl.maximum(first, q_first - left)
        full_first = tl.maximum(full_first, q_last - left)
    if right is not None:
        last = tl.minimum(last, q_last + right + 1)
        full_last = tl.minimum(full_last, q_first + right + 1)
    return _blocks(first, last, full_first, full_last, BLOCK_N)


@triton.jit
def query_blocks(k_first, k_last, offset, T_q, left, right, BLOCK_M: tl.constexpr):
    """Query blocks of the keys at positions k_first..k_last: the inverse of `key_blocks`.

    Rows, not positions, are counted: row i stands at i + offset. Keys that no row may see do not
    matter here, since they touch their own row of dK and dV alone, which is written as 0.
    """
    first = 0
    last = T_q
    full_first = 0
    full_last = T_q
    if right is not None:
        first = tl.maximum(first, k_first - right - offset)
        full_first = tl.maximum(full_first, k_last - right - offset)
    if left is not None:
        last = tl.minimum(last, k_last + left - offset + 1)
        full_last = tl.minimum(full_last, k_first + left - offset + 1)
    return _blocks(first, last, full_first, full_last, BLOCK_M)


@triton.jit
def boundary_block(i, lo, full_lo, full_hi):
    """Number of the i-th boundary block: those before the full blocks, then those after them."""
    before = full_lo - lo
    return tl.where(i < before, lo + i, full_hi + i - before)
