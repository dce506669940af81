"""Packed sequences: the rows of each, its tiles, and the rows that no sequence owns.

Offsets that do not rise from 0 to the number of rows in memory lead to no access outside of it.
"""

import triton
import triton.language as tl

from .integers import int32_within, value

_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def rows_of_sequence(b, cu_ptr, T):
    """First row of packed sequence b, and its number of rows, of the T in memory."""
    first = int32_within(tl.load(cu_ptr + b), 0, T)
    return first, int32_within(tl.load(cu_ptr + b + 1), first, T) - first


@triton.jit
def sequence_of(slot, cu_ptr, sequences, BLOCK: tl.constexpr):
    """The packed sequence that owns a slot, and the slot's tile number in it.

    Sequence b owns the slots from cu[b] // BLOCK + b up to the next sequence's: at least one per
    tile, so neither the host nor the grid needs to know lengths.
    """
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle
    before = int32_within(tl.load(cu_ptr + low), 0, _LARGEST) // BLOCK + low
    return low, tl.maximum(slot - before, 0)


@triton.jit
def clear_unowned(ptr, fill, cols, WIDTH, stride_h, stride_t, heads, ends):
    """Fill the rows that follow the last packed sequence, of [heads, T, WIDTH] with these strides.

    cols: 0.. to at least WIDTH - 1, in any layout. ends: `cu_ptr` and its number of sequences, a
    `runtime_int`, and T. The programs of the launch share the rows.
    """
    cu_ptr, sequences, T = ends
    first = int32_within(tl.load(cu_ptr + value(sequences)), 0, T) + tl.program_id(0)
    values = (cols * 0).to(ptr.dtype.element_ty) + fill
    for i in range(0, tl.cdiv(tl.maximum(T - first, 0), tl.num_programs(0))):
        row = first + i * tl.num_programs(0)
        row_ptr = ptr + tl.cast(row, tl.int64) * stride_t
        for h in range(0, heads):
            tl.store(row_ptr + tl.cast(h, tl.int64) * stride_h + cols, values, mask=cols < WIDTH)
