"""Tiles in memory, the tile of a program, and batch rows, packed or not.

mask: see `mask.Mask`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .integers import int32_within, value


class Constants(NamedTuple):
    """Compile-time constants of a kernel.

    D, D_V: head dims; BLOCK_D, BLOCK_DV: padded to powers of two. FAR: offsets inside a tile take
    64 bits. PRECISION: of fp32 products. HALVES: operands have 16 bits, for matrix units. D2,
    BLOCK_D2: of a second product, or of relative keys (D).
    """

    D: int
    D_V: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    FAR: bool
    PRECISION: str
    HALVES: bool
    D2: int
    BLOCK_D2: int


@triton.jit
def _pointers(ptr, stride_t, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    offsets = rows[:, None] * stride_t + cols[None, :]
    return ptr + tl.cast(first, tl.int64) * stride_t + offsets


@triton.jit
def load_tile(x, first, keep, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first..first+ROWS-1 of a `Head` as [ROWS, COLS]; 0 where keep [ROWS] is False or past
    WIDTH columns; None without a head.

    keep = None promises that every row exists. WIDTH is the true head dim, COLS its power of two.
    """
    tile = None
    if x is not None:
        tile = load_at(_pointers(x.ptr, x.stride, first, ROWS, COLS), keep, COLS, WIDTH)
    return tile


_WIDE_PRODUCT = tl.constexpr("mul.wide.s32 $0, $1, $2;")


@triton.jit
def load_block(x, first, keep, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """`load_tile` in a loop over blocks.

    `load_tile` would keep the loop-invariant offsets inside a tile in registers. Here each row
    number is multiplied anew, in one instruction, by a stride that compilers must not widen before
    the loop, as a 64-bit product takes four.
    """
    tile = None
    if x is not None:
        BITS: tl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth
        # fp32 products of whole tiles leave no registers for it: Triton 3.9 spills one.
        SHORT: tl.constexpr = x.stride.dtype == tl.int32 and BITS == 16
        if SHORT and cuda_capability_geq(8):
            factors = [first + tl.arange(0, ROWS), x.stride]
            offsets = tl.inline_asm_elementwise(_WIDE_PRODUCT, "=l,r,r", factors, tl.int64, True, 1)
            offsets = tl.multiple_of(offsets, 128 // BITS)[:, None]
            # Columns first, as their sum is loop-invariant.
            pointers = x.ptr + tl.arange(0, COLS)[None, :] + offsets
        else:
            pointers = _pointers(x.ptr, x.stride, first, ROWS, COLS)
        tile = load_at(pointers, keep, COLS, WIDTH)
    return tile


@triton.jit
def load_rows(
    x, desc, tile, first, keep, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """`load_block` of a tile's keys or values: by TMA if it has a descriptor and every row exists.

    desc: of [B, H, T, D] in blocks of one head, or None.
    """
    if desc is not None and keep is None:
        at = [tile.batch, tile.h_k, tile.first_k + first, 0]
        rows = desc.load(at).reshape(ROWS, COLS)
    else:
        rows = load_block(x, first, keep, ROWS, COLS, WIDTH)
    return rows


@triton.jit
def load_at(pointers, keep, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """`load_tile` for arbitrary rows: pointers [ROWS, COLS]."""
    if keep is not None:
        if WIDTH == COLS:
            tile = tl.load(pointers, mask=keep[:, None], other=0)
        else:
            within = (tl.arange(0, COLS) < WIDTH)[None, :]
            tile = tl.load(pointers, mask=keep[:, None] & within, other=0)
    else:
        if WIDTH == COLS:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(tl.arange(0, COLS) < WIDTH)[None, :], other=0)
    return tile


_LOAD_32 = tl.constexpr("ld.global.nc.b32 $0, [$1];")
_LOAD_16 = tl.constexpr("ld.global.nc.b16 $0, [$1];")
_LOAD_32_IF = tl.constexpr("""{
    .reg .pred here;
    setp.ne.b32 here, $2, 0;
    mov.b32 $0, 0;
    @here ld.global.nc.b32 $0, [$1];
}""")
_LOAD_16_IF = tl.constexpr("""{
    .reg .pred here;
    setp.ne.b32 here, $2, 0;
    mov.b16 $0, 0;
    @here ld.global.nc.b16 $0, [$1];
}""")


@triton.jit
def load_in_place(pointers, keep):
    """Load from arbitrary pointers, 0 where keep is False; each thread loads its own numbers.

    For memory that the kernel does not write. The compiler would coalesce the loads and convert
    layouts, or copy 4-byte numbers to shared memory one by one.
    """
    BITS: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
    WIDE: tl.constexpr = BITS == 32
    if (BITS != 32 and BITS != 16) or not cuda_capability_geq(8):
        x = load_vector(pointers, keep, 0)
    elif keep is None:
        CODE: tl.constexpr = _LOAD_32 if WIDE else _LOAD_16
        PLACES: tl.constexpr = "=r,l" if WIDE else "=h,l"
        at = [pointers.to(tl.int64)]
        x = tl.inline_asm_elementwise(CODE, PLACES, at, pointers.dtype.element_ty, True, 1)
    else:
        CODE_IF: tl.constexpr = _LOAD_32_IF if WIDE else _LOAD_16_IF
        PLACES_IF: tl.constexpr = "=r,l,r" if WIDE else "=h,l,r"
        at = [pointers.to(tl.int64), keep.to(tl.int32)]
        x = tl.inline_asm_elementwise(CODE_IF, PLACES_IF, at, pointers.dtype.element_ty, True, 1)
    return x


@triton.jit
def load_vector(pointers, keep, other):
    """Load one number per row, `other` where keep is False; keep = None: every row exists."""
    return tl.load(pointers, mask=keep, other=other if keep is not None else None)


@triton.jit
def store_tile(x, first, tile, keep, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Write WIDTH columns of tile [ROWS, COLS] to rows of a `Head` where keep [ROWS] is True."""
    pointers = _pointers(x.ptr, x.stride, first, ROWS, COLS)
    mask = keep[:, None]
    if WIDTH != COLS:
        mask = mask & (tl.arange(0, COLS) < WIDTH)[None, :]
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_tile(
    ptr, stride_t, first, tile, keep, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """Add tile [ROWS, COLS] atomically to fp32 rows; arguments as in `load_tile`."""
    cols = tl.arange(0, COLS)
    if not cuda_capability_geq(9):
        # Here each atomic takes one column. If the compiler knew that columns are contiguous, a
        # thread would take four, and each of its atomics would touch every sector of the row.
        cols = tl.minimum(cols, COLS - 1)
    # In this form each address is one instruction. The loop-invariant offsets of `_pointers` would
    # stay in registers.
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    pointers = ptr + cols[None, :] + rows[:, None] * stride_t
    mask = None
    if keep is not None:
        mask = keep[:, None]
    if WIDTH != COLS:
        within = (cols < WIDTH)[None, :]
        mask = within if keep is None else mask & within
    tl.atomic_add(pointers, tile, mask=mask, sem="relaxed")


class BatchRow(NamedTuple):
    """Facts about a batch row, or a packed sequence.

    b: its number. offset: position of query 0. start, end: range of its keys. solid: the range has
    no holes. prefix: keys before it are visible despite causal. shift: position of key 0. With
    explicit positions, offset is the position minus the index of a tile's queries, and shift of a
    block's keys.
    """

    b: Any
    T_q: Any
    T_k: Any
    offset: Any
    start: Any
    end: Any
    solid: Any
    prefix: Any
    shift: Any


# Explicit positions are consecutive within this many tokens, the largest tile.
ORDERED = tl.constexpr(128)
# Distances of queries from the first key are clamped to this: longer than any sequence, but sums
# fit in int32.
FARTHEST = tl.constexpr(1 << 28)
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def rows_of_sequence(b, cu_ptr, T):
    """First row of packed sequence b, and its number of rows, of the T in memory."""
    first = int32_within(tl.load(cu_ptr + b), 0, T)
    return first, int32_within(tl.load(cu_ptr + b + 1), first, T) - first


@triton.jit
def memory_rows(b, T_q, T_k, mask):
    """Start of batch row b in memory: (batch index, first query, first key)."""
    batch = b
    first_q = 0
    first_k = 0
    if mask.cu_q_ptr is not None:
        batch = 0
        first_q, _ = rows_of_sequence(b, mask.cu_q_ptr, T_q)
        first_k, _ = rows_of_sequence(b, mask.cu_k_ptr, T_k)
    return batch, first_q, first_k


@triton.jit
def batch_row(b, T_q, T_k, mask):
    """`BatchRow` of batch row b."""
    if mask.cu_q_ptr is not None:
        _, T_q = rows_of_sequence(b, mask.cu_q_ptr, T_q)
        _, T_k = rows_of_sequence(b, mask.cu_k_ptr, T_k)
    offset = T_k - T_q
    if mask.query_offset is not None:
        offset = value(mask.query_offset)
    if mask.offsets_ptr is not None:
        offset = int32_within(tl.load(mask.offsets_ptr + b), -FARTHEST, FARTHEST)
    start = 0
    end = T_k
    solid = True
    if mask.lengths_ptr is not None:
        end = int32_within(tl.load(mask.lengths_ptr + b), 0, T_k)
    if mask.extents_ptr is not None:
        extents_ptr = mask.extents_ptr + tl.cast(b, tl.int64) * value(mask.extents_stride)
        start = tl.load(extents_ptr)
        end = tl.minimum(end, tl.load(extents_ptr + 1))
        solid = tl.load(extents_ptr + 2) == 0
    prefix = 0
    if mask.prefix_ptr is not None:
        last = T_k
        if mask.k_positions_ptr is not None:
            last = FARTHEST
        prefix = int32_within(tl.load(mask.prefix_ptr + b), 0, last)
    return BatchRow(b, T_q, T_k, offset, start, end, solid, prefix, 0)


@triton.jit
def at_queries(row, m_first, mask):
    """The row with the offset of the queries from m_first on."""
    offset = row.offset
    if mask.q_positions_ptr is not None:
        row_ptr = mask.q_positions_ptr + tl.cast(row.b, tl.int64) * value(mask.positions_strides[0])
        offset = tl.load(row_ptr + m_first) - m_first
    return BatchRow(*row[:3], offset, *row[4:])  # type: ignore[call-arg]


@triton.jit
def at_keys(row, n_first, mask):
    """The row with the shift of the keys from n_first on."""
    shift = row.shift
    if mask.k_positions_ptr is not None:
        row_ptr = mask.k_positions_ptr + tl.cast(row.b, tl.int64) * value(mask.positions_strides[1])
        shift = tl.load(row_ptr + n_first) - n_first
    return BatchRow(*row[:8], shift)  # type: ignore[call-arg]


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
def ends_of(cu_ptr, mask, T):
    """`ends` for `clear_unowned`, of T rows in memory; () if they are not packed."""
    # Not None, which Triton 3.6 cannot return within a tuple.
    ends = ()
    if cu_ptr is not None:
        ends = (cu_ptr, mask.sequences, T)  # type: ignore[assignment]
    return ends


@triton.jit
def clear_unowned(ptr, fill, cols, WIDTH, stride_h, stride_t, heads, ends):
    """Fill the rows that follow the last packed sequence, of [heads, T, WIDTH] with these strides.

    cols: 0.. to at least WIDTH - 1, in any layout. ends: `cu_ptr` and its number of sequences, a
    `runtime_int`, and T. The programs of the launch share the rows.
    """
    cu_ptr, sequences, T = ends
    first = int32_within(tl.load(cu_ptr + value(sequences)), 0, T) + tl.program_id(0)
    values = (cols * 0 + fill).to(ptr.dtype.element_ty)
    for i in range(0, tl.cdiv(tl.maximum(T - first, 0), tl.num_programs(0))):
        row = first + i * tl.num_programs(0)
        row_ptr = ptr + tl.cast(row, tl.int64) * stride_t
        for h in range(0, heads):
            tl.store(row_ptr + tl.cast(h, tl.int64) * stride_h + cols, values, mask=cols < WIDTH)


@triton.jit
def clear_output(ptr, strides, cols, WIDTH, heads, ends):
    """`clear_unowned` with 0 of a tensor of `operands.head`; nothing if ends is ()."""
    if len(ends) > 0:
        stride_h, stride_t = value(strides[1]), value(strides[2])
        clear_unowned(ptr, 0, cols, WIDTH, stride_h, stride_t, heads, ends)


@triton.jit
def _place(slot, row, heads, cu_ptr, sequences, BLOCK: tl.constexpr):
    """(tile, b, head) of a slot; row: head, or batch row and head."""
    tile = slot
    b = row // heads
    if cu_ptr is not None:
        b, tile = sequence_of(slot, cu_ptr, value(sequences), BLOCK)
    return tile, b, row % heads


@triton.jit
def first_slot(b, first, mask, ROWS: tl.constexpr):
    """First row of batch row b if heads are padded to whole tiles of ROWS rows.

    first: start of packed sequence b in memory. Sequences do not share tiles.
    """
    slot = 0
    if mask.cu_q_ptr is not None:
        slot = (first // ROWS + b) * ROWS
    return slot


@triton.jit
def _slots(T, cu_ptr, sequences, BLOCK: tl.constexpr):
    slots = tl.cdiv(T, BLOCK)
    if cu_ptr is not None:
        slots = T // BLOCK + value(sequences)
    return slots


@triton.jit
def query_program(T_q, H_q, G, mask, BLOCK_M: tl.constexpr):
    """(query tile, b, h_q, h_k) of this program; T_q counts the rows in memory.

    Consecutive programs are the G heads of a K/V head, then its tiles from the last (the longest,
    if causal) to the first: they share K/V in L2, and short tiles fill the end. A tile may be past
    the end of its packed sequence.
    """
    pid = tl.program_id(0)
    slots = _slots(T_q, mask.cu_q_ptr, mask.sequences, BLOCK_M)
    slot = slots - 1 - (pid // G) % slots
    tile, b, h_k = _place(
        slot, pid // (G * slots), H_q // G, mask.cu_q_ptr, mask.sequences, BLOCK_M
    )
    return tile, b, h_k * G + pid % G, h_k


@triton.jit
def query_rows(tile, T_q, BLOCK_M: tl.constexpr):
    """First and last existing row of a query tile, its rows [BLOCK_M], and their existence."""
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    return first, tl.minimum(first + BLOCK_M, T_q) - 1, rows, rows < T_q


@triton.jit
def key_program(T_k, H_k, mask, BLOCK_N: tl.constexpr, parts=1):
    """(key tile, b, h_k) of this program; the first keys, which most queries see, come first.

    parts: consecutive programs per tile.
    """
    pid = tl.program_id(0) // parts
    slots = _slots(T_k, mask.cu_k_ptr, mask.sequences, BLOCK_N)
    return _place(pid % slots, pid // slots, H_k, mask.cu_k_ptr, mask.sequences, BLOCK_N)
