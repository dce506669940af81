"""The mask: which keys a query sees.

Query i of batch row b is at position p = i + offset[b] among the keys. It sees key j iff

    near      p - left <= j <= p + right      the window; a side left out is unbounded
              or (p - j) % stride == 0        where given; without a window, alone
              or j < keep_first               where given
    in time   j <= p  or  j < prefix[b]       where causal
    existing  start <= j < end                the keys of the row: its length, its padding mask
              padding[b, j], document id >= 0
    in the    same document, attn_mask[b, h, i, j], mask_mod(b, h, p, j), where given; of the new
    masks     tokens of a packed row, from offset on, tree_mask[i, j - offset]

`visible` implements the rule for elements of any shape: forward passes columns of queries and rows
of keys, dK/dV the transpose. `plans` derives the blocks to visit.

With explicit positions, p and j above are these, except that lengths, padding, documents and
attn_mask index keys in memory. Positions are consecutive within each 128 tokens, so that a tile has
one offset and a block of keys one shift, set by `at_queries` and `at_keys`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .integers import at_most, value
from .tile import FARTHEST


class Mask(NamedTuple):
    """The mask as a kernel argument: pointers, and integers as `runtime_int`s; None = absent.

    left, right, keep_first, stride, query_offset: integers. causal: 0 unless `right` includes it.
    cu_q_ptr, cu_k_ptr, sequences: offsets int32 [sequences + 1] of packed sequences, which then are
    the batch rows. extents_ptr, extents_stride: see `key_extents`. tables: see `block_sparsity`.
    mod: the user's function, tensors: its further arguments. positions_strides: to the next batch
    row, of queries and of keys. first_head: see `head_of_whole`. tree_starts_ptr: start of each row
    of the tree mask. tree: strides of the starts, of queries (None: the row's tokens) and of keys,
    most keys, and the end of the memory. ordered: not None if all blocks are masked, and so visited
    in the order of the keys.
    """

    query_offset: Any = None
    left: Any = None
    right: Any = None
    causal: Any = None
    keep_first: Any = None
    stride: Any = None
    offsets_ptr: Any = None
    lengths_ptr: Any = None
    prefix_ptr: Any = None
    padding_ptr: Any = None
    padding_stride: Any = None
    extents_ptr: Any = None
    extents_stride: Any = None
    q_documents_ptr: Any = None
    k_documents_ptr: Any = None
    documents_strides: Any = None
    q_positions_ptr: Any = None
    k_positions_ptr: Any = None
    positions_strides: Any = None
    attn_mask_ptr: Any = None
    attn_mask_strides: Any = None
    cu_q_ptr: Any = None
    cu_k_ptr: Any = None
    sequences: Any = None
    counts_ptr: Any = None
    blocks_ptr: Any = None
    table_strides: Any = None
    mod: Any = None
    tensors: Any = ()
    first_head: Any = None
    tree_ptr: Any = None
    tree_starts_ptr: Any = None
    tree: Any = None
    ordered: Any = None


# Numbers before the words in a row of extents.
EXTENTS = tl.constexpr(3)


@triton.jit
def padding_words(n_first, row, mask, BLOCK_N: tl.constexpr):
    """Padding words, a bit per key, of the block of keys from n_first on."""
    row_ptr = mask.extents_ptr + tl.cast(row.b, tl.int64) * value(mask.extents_stride)
    row_ptr += EXTENTS + n_first // 32
    words = (tl.load(row_ptr),)
    for i in tl.static_range(1, BLOCK_N // 32):
        words += (tl.load(row_ptr + i),)  # type: ignore[assignment]
    if BLOCK_N < 32:
        words = (words[0] >> (n_first & 31),)
    return words


@triton.jit
def padded_keys(words, BLOCK_N: tl.constexpr, cols=None):
    """bool [BLOCK_N]: the bits of `padding_words`. cols: 0, 1, ... BLOCK_N - 1."""
    if cols is None:
        cols = tl.arange(0, BLOCK_N)
    word = words[0]
    for i in tl.static_range(1, BLOCK_N // 32):
        word = tl.where(cols < 32 * i, word, words[i])
    # In a product's layout of 16-bit numbers, threads differ only in these columns: a thread shifts
    # a word once, and the second shift is a constant.
    word = word >> (cols & 6)
    return ((word >> (cols & 25)) & 1) != 0


@triton.jit
def valid_keys(k_pos, row, mask, words=None):
    """True for keys that some query may see. Others are never loaded.

    words: of a block of keys, in place of the padding mask.
    """
    valid = (k_pos >= row.start) & (k_pos < row.end)
    if words is not None:
        valid = valid & padded_keys(words, k_pos.shape[0])
    elif mask.padding_ptr is not None:
        row_ptr = mask.padding_ptr + tl.cast(row.b, tl.int64) * value(mask.padding_stride)
        valid = valid & (tl.load(row_ptr + k_pos, mask=valid, other=0) != 0)
    if mask.k_documents_ptr is not None:
        row_ptr = mask.k_documents_ptr + tl.cast(row.b, tl.int64) * value(mask.documents_strides[1])
        valid = valid & (tl.load(row_ptr + k_pos, mask=valid, other=-1) >= 0)
    return valid


@triton.jit
def visible(rows, k_pos, h, row, mask, valid=None, first=None):
    """True where query number `rows` of head h sees the key at k_pos, if both exist.

    False for keys from the row's end on. rows and k_pos broadcast to the shape of the result.
    valid, in the shape of k_pos: from `valid_keys`; the result is False for others. first: the
    least k_pos, if keys are columns and consecutive.
    """
    keep = _in_range(rows + row.offset, k_pos, row, mask, valid, first)
    b = tl.cast(row.b, tl.int64)
    if mask.q_documents_ptr is not None:
        q_ptr = mask.q_documents_ptr + b * value(mask.documents_strides[0])
        k_ptr = mask.k_documents_ptr + b * value(mask.documents_strides[1])
        q_document = tl.load(q_ptr + rows, mask=rows < row.T_q, other=-1)
        keep = keep & (q_document == tl.load(k_ptr + k_pos, mask=k_pos < row.T_k, other=-1))
    if mask.attn_mask_ptr is not None:
        pointers = elements(mask.attn_mask_ptr, b, h, rows, k_pos, mask.attn_mask_strides)
        inside = (rows < row.T_q) & (k_pos < row.T_k)
        keep = keep & (tl.load(pointers, mask=inside, other=0) != 0)
    if mask.tree_ptr is not None:
        keep = keep & _in_tree(rows, k_pos, row, mask)
    if mask.mod is not None:
        keep = keep & shown_by(mask.mod, rows, k_pos, h, row, mask)
    return keep


@triton.jit
def shown_by(mod, rows, k_pos, h, row, mask):
    """The result of the user's function, which may load by position: of existing pairs."""
    q_pos = tl.minimum(rows, row.T_q - 1) + row.offset
    k_pos = tl.minimum(k_pos, row.T_k - 1) + row.shift
    return mod(row.b, head_of_whole(h, mask), q_pos, k_pos, *mask.tensors)


@triton.jit
def _in_tree(rows, k_pos, row, mask):
    """Whether a key is an old token, or a new one that the tree mask shows to the query."""
    stride_start, stride_q, stride_k, width, end = mask.tree
    new = k_pos - row.offset
    start = tl.load(mask.tree_starts_ptr + row.b).to(tl.int64) * value(stride_start)
    step = row.T_q if stride_q is None else value(stride_q)
    count = tl.minimum(row.T_q, value(width))
    # Starts are on the device: a row that exceeds the mask's memory sees no new token.
    last = (row.T_q - 1).to(tl.int64) * step + (count - 1).to(tl.int64) * value(stride_k)
    fits = (start >= 0) & (start + last < value(end))
    inside = (rows < row.T_q) & (new >= 0) & (new < tl.where(fits, count, 0))
    pointers = mask.tree_ptr + start + rows.to(tl.int64) * step + new.to(tl.int64) * value(stride_k)
    return (new < 0) | (tl.load(pointers, mask=inside, other=0) != 0)


@triton.jit
def _in_range(position, k_pos, row, mask, valid, first):
    """Whether a key is near, in time, before the row's end, and valid.

    Ranges become one or two limits per row, so that an element takes one comparison with each: most
    of the mask's cost in boundary blocks of causal masks. The row dim is constant in the loop, so
    it absorbs as much as possible.
    """
    KEYS_DOWN: tl.constexpr = k_pos.shape[0] > 1
    RANGED: tl.constexpr = mask.stride is None and mask.keep_first is None
    sought = k_pos
    # Only the position's shape matters here: no key is this far ahead.
    last = position + 2 * FARTHEST
    if mask.causal is not None:
        last = tl.maximum(position, row.prefix - 1)
    if RANGED and mask.right is not None:
        right = position + value(mask.right)
        last = right if mask.causal is None else tl.minimum(last, right)
    if mask.padding_ptr is None and mask.k_documents_ptr is None:
        valid = None
    if mask.k_positions_ptr is not None:
        sought = tl.where(k_pos < row.end, k_pos + row.shift, 4 * FARTHEST)
        k_pos = k_pos + row.shift
    elif KEYS_DOWN:
        exists = k_pos < row.end
        if valid is not None:
            exists = exists & valid
            valid = None
        sought = tl.where(exists, k_pos, 4 * FARTHEST)
    else:
        last = tl.minimum(last, row.end - 1)
        if first is not None:
            # A thread's columns differ only in the other bits, known at compile time: subtracted
            # from the limits, they make comparisons with constants.
            BITS: tl.constexpr = (k_pos.shape[1] - 1) & -7
            cols = k_pos - first
            shared = first + (cols & 6)
            sought = cols & BITS
            last = last - shared
    keep = at_most(sought, last, valid)
    if RANGED:
        if mask.left is not None and KEYS_DOWN:
            keep = at_most(position, k_pos + value(mask.left), keep)
        elif mask.left is not None:
            least = position - value(mask.left)
            if first is not None and mask.k_positions_ptr is None:
                least = least - shared
            keep = at_most(least, sought, keep)
    else:
        keep = keep & _near(k_pos - position, k_pos, mask)
    return keep


@triton.jit
def _near(ahead, k_pos, mask):
    """Whether a key `ahead` positions after the query is in the window, on the stride or kept."""
    near = ahead == ahead  # all True, in the tile's Gluon layout
    if mask.right is not None:
        near = near & (ahead <= value(mask.right))
    if mask.left is not None:
        near = near & (ahead >= -value(mask.left))
    if mask.stride is not None:
        on_stride = ahead % value(mask.stride) == 0
        near = on_stride if mask.left is None and mask.right is None else near | on_stride
    if mask.keep_first is not None:
        near = near | (k_pos < value(mask.keep_first))
    return near


@triton.jit
def elements(ptr, b, h, rows, k_pos, strides):
    """Pointers to [b, h, rows, k_pos] of a tensor with four strides, 0 where it is broadcast."""
    ptr += tl.cast(b, tl.int64) * value(strides[0]) + tl.cast(h, tl.int64) * value(strides[1])
    return ptr + rows.to(tl.int64) * value(strides[2]) + k_pos.to(tl.int64) * value(strides[3])


@triton.jit
def head_of_whole(h, record):
    """Index in the full model of head h of a call with a slice of the heads.

    record: a `Mask` or a `Score`.
    """
    if record.first_head is not None:
        h = h + value(record.first_head)
    return h


@triton.jit
def any_key(valid):
    """Whether any key of the block exists."""
    return tl.max(valid.to(tl.int32), 0) != 0


@triton.jit
def seen_by_position(m_first, m_last, n_first, n_last, row, mask):
    """For blocks of queries and keys with consecutive positions: (whether any pair may be visible,
    whether all are), by positions alone.
    """
    q_first = m_first + row.offset
    q_last = m_last + row.offset
    k_first = n_first + row.shift
    k_last = n_last + row.shift
    if mask.stride is not None:
        some = m_first <= m_last
        each = m_first > m_last
    else:
        # The window includes distance 0, and the pairs' distances have no gaps.
        least = k_first - q_last
        most = k_last - q_first
        some = _near(tl.minimum(tl.maximum(least, 0), most), k_first, mask)
        each = _near(least, k_last, mask) & _near(most, k_last, mask)
    if mask.causal is not None:
        some = some & (k_first <= tl.maximum(q_last, row.prefix - 1))
        each = each & (k_last <= tl.maximum(q_first, row.prefix - 1))
    return some, each
