"""Pages, slots and rings: the location of a position in a cache.

A buffer holds pages [P, H_k, S, width]. Launchers take `CacheTensors` and pass `Pages` to their
kernels.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .integers import runtime_int, value
from .operands import Head
from .tile import load_at, load_block, load_tile, load_vector


class CacheTensors(NamedTuple):
    """The tensors of a cache.

    k [P, H_k, S, D] and v [P, H_k, S, D_v] have rows without gaps, and any other strides. With
    k_scale and v_scale, fp32 [P, H_k, S] of any strides, 0 where tokens share a scale, they hold
    codes: int8, or e4m3; v_scale [P, H_k, S, groups]: a scale for each of so many parts of a row.
    lengths int32 [rows], None: see `launch_decode`; counters int32 [rows], zero between launches,
    for appending; batch_index int [B]: the row of each batch element, None: its own number.
    block_table int32 [rows, N]: the pages of a row, None: page r is row r. keep_first: of a ring,
    how many first positions stay; None: no ring. shared:
    keys are the columns of v and, where they have more, then those of k, which may be numbers
    where v holds codes.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    lengths: Tensor | None
    counters: Tensor | None
    batch_index: Tensor | None
    keep_first: int | None
    shared: bool = False


class Pages(NamedTuple):
    """Layout of a cache's positions; integers in the form of `runtime_int`.

    shift: page_size = 2**shift if it is a power of two: then positions need no division.
    """

    block_table_ptr: Any
    table_width: int | None  # columns
    page_count: int | None
    page_size: int | None
    shift: int | None
    keep_first: int | None
    heads: int | None  # H_k


class Store(NamedTuple):
    """One buffer of a cache, with scales of its rows if it holds codes.

    strides: of pages, heads and slots, in the form of `runtime_int`; None for slots: rows are
    contiguous. scale_strides: likewise; None: scales in the order of `slot_rows`. shared: not None
    if several tokens share a given scale.
    """

    ptr: Any
    scale_ptr: Any
    strides: tuple[int | None, ...]
    scale_strides: tuple[int | None, ...] | None = None
    shared: int | None = None


def stored(buffer: Tensor, scale: Tensor | None, in_order: bool = False) -> Store:
    """`Store` of a buffer [P, H_k, S, width], for a kernel; e4m3 codes as bytes.

    in_order: for `load_slots`, which has its own code for contiguous rows.
    """
    # Some GPUs lack fp8.
    is_fp8 = buffer.dtype == torch.float8_e4m3fn
    strides = tuple(map(runtime_int, buffer.stride()[:3]))
    # With fp32 products the compiler's code for it has too few registers.
    if in_order and buffer.stride(2) == buffer.shape[3] and buffer.element_size() < 4:
        strides = (*strides[:2], None)
    of_scales = None
    if scale is not None and (scale.dim() > 3 or not scale.is_contiguous()):
        of_scales = tuple(map(runtime_int, scale.stride()[:3]))
    shared = None if scale is None or not shares_scales(scale) else 1
    stored = buffer.view(torch.uint8) if is_fp8 else buffer
    return Store(stored, scale, strides, of_scales, shared)


def shares_scales(scale: Tensor) -> bool:
    """Whether tokens share a given scale: an expanded tensor."""
    steps = zip(scale.shape, scale.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in steps)


def groups_of(cache: CacheTensors) -> int:
    """Number of parts of a row of v that have a scale each."""
    return 1 if cache.v_scale is None or cache.v_scale.dim() == 3 else cache.v_scale.shape[3]


def row_bytes(cache: CacheTensors) -> int:
    """Width of loads: the largest power of two up to 16 that divides the strides in bytes."""
    steps = [
        step * x.element_size()
        for x in (cache.k, cache.v)
        for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)
        if size > 1
    ]
    return math.gcd(16, *steps)


def pages_of(cache: CacheTensors) -> Pages:
    """`Pages` of a cache, for a kernel."""
    table = cache.block_table
    P, H_k, S, _ = cache.k.shape
    width = None if table is None else runtime_int(table.shape[1])
    whole = table is not None and S & (S - 1) == 0
    return Pages(
        table,
        width,
        runtime_int(P),
        runtime_int(S),
        runtime_int(S.bit_length() - 1) if whole else None,
        runtime_int(cache.keep_first),
        runtime_int(H_k),
    )


@triton.jit
def _page_number(positions, pages):
    """Index of a position's page among its row's pages."""
    if pages.shift is not None:
        number = positions >> value(pages.shift)
    else:
        number = positions // value(pages.page_size)
    return number


@triton.jit
def has_slot(positions, pages):
    """Whether a row has a slot for a position; negative positions and those past the end have none.

    A row ends with its columns of the block table, or its page; a ring has no end.
    """
    valid = positions >= 0
    if pages.block_table_ptr is not None:
        valid = valid & (_page_number(positions, pages) < value(pages.table_width))
    else:
        if pages.keep_first is None:
            valid = valid & (positions < value(pages.page_size))
    return valid


@triton.jit
def in_pool(page, pages):
    """Whether a block table's entry is a valid page number."""
    return (page >= 0) & (page < value(pages.page_count))


@triton.jit
def locate(row, positions, keep, pages):
    """Page and slot of positions with a slot; not for keep = False.

    The page is the block table's entry, which may be invalid (see `in_pool`).
    """
    size = value(pages.page_size)
    if pages.block_table_ptr is not None:
        number = _page_number(positions, pages)
        entry = row.to(tl.int64) * value(pages.table_width) + number
        page = tl.load(pages.block_table_ptr + entry, mask=keep, other=0)
        slot = positions - number * size
    else:
        page = row.to(tl.int32) + 0 * positions
        slot = positions
        if pages.keep_first is not None:
            first = value(pages.keep_first)
            turned = first + (positions - first) % (size - first)
            slot = tl.where(positions < first, positions, turned)
    return page, slot


@triton.jit
def lasting(positions, end, pages):
    """Whether a row of `end` tokens still holds a position."""
    keep = positions < end
    if pages.keep_first is not None:
        first = value(pages.keep_first)
        keep = keep & ((positions < first) | (positions >= end - (value(pages.page_size) - first)))
    return keep


@triton.jit
def slot_rows(page, head, slot, pages):
    """Index, int64, of a head's slot among all rows of a dense buffer."""
    return (page.to(tl.int64) * value(pages.heads) + head) * value(pages.page_size) + slot


class Places(NamedTuple):
    """Stored rows of a head: its slot, or the slots [N], in one page, or in pages [N].

    keep [N]: which rows exist; None: all.
    """

    pages: Any
    page: Any
    slot: Any
    head: Any
    keep: Any


@triton.jit
def _load_rows(
    ptr, strides, at, COLS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr, of: tl.constexpr
):
    """`load_slots` from ptr. FORM: shift of the strides. of: the kernel's constants."""
    ALIGN: tl.constexpr = 8 * of.ROW_BYTES // ptr.dtype.element_ty.primitive_bitwidth
    # `value` inlined by hand: inlining a call loses hints on its result.
    stride_p = tl.multiple_of((strides[0] >> FORM).to(tl.int64), ALIGN)
    stride_h = tl.multiple_of((strides[1] >> FORM).to(tl.int64), ALIGN)
    stride = WIDTH
    if strides[2] is not None:
        stride = tl.multiple_of((strides[2] >> FORM).to(tl.int32), ALIGN)
    start = ptr + at.head * stride_h + (at.page * stride_p + at.slot.to(tl.int64) * stride)
    if of.ONE_PAGE:
        tile = load_tile(Head(start, stride), 0, at.keep, of.BLOCK_N, COLS, WIDTH)
    else:
        pointers = start[:, None] + tl.arange(0, COLS)[None, :]
        tile = load_at(pointers, at.keep, COLS, WIDTH)
    return tile


@triton.jit
def load_columns(store, at, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    """`load_slots` of numbers that are a part of longer rows."""
    BITS: tl.constexpr = store.ptr.dtype.element_ty.primitive_bitwidth
    ALIGN: tl.constexpr = 1 if 8 * const.ROW_BYTES < BITS else 8 * const.ROW_BYTES // BITS
    # `value` inlined by hand: see `_load_rows`.
    stride_p = tl.multiple_of((store.strides[0] >> 2).to(tl.int64), ALIGN)
    stride_h = tl.multiple_of((store.strides[1] >> 2).to(tl.int64), ALIGN)
    stride = tl.multiple_of((store.strides[2] >> 2).to(tl.int32), ALIGN)
    start = store.ptr + at.head * stride_h + at.page * stride_p
    if const.ONE_PAGE:
        tile = load_block(Head(start, stride), at.slot, at.keep, const.BLOCK_N, COLS, WIDTH)
    else:
        rows = start + at.slot.to(tl.int64) * stride
        tile = load_at(rows[:, None] + tl.arange(0, COLS)[None, :], at.keep, COLS, WIDTH)
    return tile


@triton.jit
def _slots(at, const: tl.constexpr):
    """The slot of each row, [N]."""
    slot = at.slot
    if const.ONE_PAGE:
        slot = slot + tl.arange(0, const.BLOCK_N)
    return slot


@triton.jit
def _columns(
    store,
    at,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    const: tl.constexpr,
):
    """Every second byte from FIRST up to END of the rows of `load_slots`, int16 [N, COLS]."""
    cols = FIRST + 2 * tl.arange(0, COLS)
    slot = _slots(at, const)
    stride_p, stride_h = value(store.strides[0]), value(store.strides[1])
    start = at.page.to(tl.int64) * stride_p + at.head.to(tl.int64) * stride_h
    start += slot.to(tl.int64) * (WIDTH if store.strides[2] is None else value(store.strides[2]))
    pointers = store.ptr + start[:, None] + cols[None, :]
    within = (cols < END)[None, :]
    if at.keep is not None:
        within = within & at.keep[:, None]
    return tl.load(pointers, mask=within, other=0).to(tl.int16) & 0xFF


@triton.jit
def load_slots(
    store, at, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr, FIRST: tl.constexpr = 0
):
    """BLOCK_N stored rows of a buffer, [N, COLS], 0 where they do not exist; codes in pairs, int16
    [N, COLS / 2].

    const.ROW_BYTES: see `row_bytes`; 1 if codes cannot be loaded in pairs. FIRST: of codes, where
    the WIDTH columns begin.
    """
    if store.scale_ptr is None:
        x = _load_rows(store.ptr, store.strides, at, COLS, WIDTH, 2, const)
    elif const.ROW_BYTES > 1:
        # Strides in 16-bit numbers are half of strides in codes.
        ptr = (store.ptr + FIRST).to(tl.pointer_type(tl.int16))
        x = _load_rows(ptr, store.strides, at, COLS // 2, WIDTH // 2, 3, const)
    else:
        HALF: tl.constexpr = COLS // 2
        END: tl.constexpr = FIRST + WIDTH
        even = _columns(store, at, FIRST, END, HALF, WIDTH, const)
        odd = _columns(store, at, FIRST + 1, END, HALF, WIDTH, const)
        x = even | (odd << 8)
    return x


@triton.jit
def load_scales(store, at, const: tl.constexpr, GROUP: tl.constexpr = 0):
    """The scales [N] of the rows of `load_slots`, 0 if keep is False."""
    places = scale_places(store, at.page, _slots(at, const), at.head, at.pages) + GROUP
    return load_vector(store.scale_ptr + places, at.keep, 0.0)


@triton.jit
def load_groups(store, at, COLS: tl.constexpr, WIDTH: tl.constexpr, const: tl.constexpr):
    """Codes and scales of rows in GROUPS parts of WIDTH columns: as many of `load_slots` and of
    `load_scales`.
    """
    GROUPS: tl.constexpr = const.GROUPS
    codes = ()
    scales = ()
    for g in tl.static_range(GROUPS):
        part = load_slots(store, at, COLS, WIDTH, const, g * WIDTH)
        codes = codes + (part,)  # type: ignore[assignment]  # noqa: RUF005
        scale = load_scales(store, at, const, g)
        scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    return codes, scales


@triton.jit
def scale_places(store, page, slot, head, pages):
    """Offsets of the scales of slots, int64."""
    if store.scale_strides is None:
        places = slot_rows(page, head, slot, pages)
    else:
        places = row_places(page, slot, head, store.scale_strides)
    return places


@triton.jit
def row_places(page, slot, head, strides):
    """Offsets of the rows of slots in a tensor [P, H_k, S, ...], int64."""
    places = page.to(tl.int64) * value(strides[0]) + head * value(strides[1]).to(tl.int64)
    return places + slot.to(tl.int64) * value(strides[2])
