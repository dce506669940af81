"""Append to a cache in place: rotate keys and queries, store keys and values, update lengths.

One launch does all work of a decoding step between the projection and attention. Token i of batch
row b gets position p = lengths[r] + i in row r of the cache. With the angles a_j = p * frequency_j
of the rotary embedding, the pair (x, y) of channels becomes (x cos a - y sin a, y cos a + x sin a).

No store leaves its row, whatever lengths, table and index hold: a token with a negative position, a
position past its row's end or an invalid page is counted and not stored; a batch row with an
invalid index is skipped.

A server that manages pages itself passes a slot for each token instead, page * page_size + offset.
The tokens are then one batch row, without lengths; tokens with an invalid slot are not stored.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import block_dim, blocks, copied, empty_in_layout, strides
from .rules.codes import row_scale, to_e4m3, to_int8
from .rules.integers import int32_within, runtime_int, value
from .rules.pages import (
    CacheTensors,
    Places,
    has_slot,
    in_pool,
    lasting,
    locate,
    pages_of,
    row_bytes,
    row_places,
    scale_places,
    stored,
)

# Elements of a program's tile: 16 per thread of four warps.
_TILE = 2048


class _Tokens(NamedTuple):
    """[B, H, T, D] in memory; integers in the form of `runtime_int`."""

    ptr: Any
    strides: tuple[int | None, ...] | None
    heads: int | None


class _Rotary(NamedTuple):
    """Tables [N, PAIRS] by position, contiguous; None: no rotation."""

    cos_ptr: Any
    sin_ptr: Any
    positions: int | None


class _Constants(NamedTuple):
    """Compile-time constants of k and q, or of v: WIDTH columns in COLS, PAIRS that are rotated.

    ALIGN: elements that divide all strides. BLOCK: (token, head) pairs of a program.
    """

    WIDTH: int
    COLS: int
    PAIRS: int
    INTERLEAVED: bool
    E4M3: bool
    ADVANCE: bool
    ROW_BYTES: int
    ALIGN: int
    BLOCK: int


class _Span(NamedTuple):
    """The cache row of a batch row, its validity, first new position and number of tokens."""

    row: Any
    exists: Any
    first: Any
    count: Any


class _Slots(NamedTuple):
    """Slots of tokens [T], and the positions that they are rotated to; None: not rotated."""

    ptr: Any
    positions_ptr: Any


@triton.jit
def _token_pointers(x, b, token, head, ALIGN: tl.constexpr):
    """Pointers to the rows of some (token, head) pairs; ALIGN elements are a launcher's promise."""
    stride_b = tl.multiple_of(value(x.strides[0]).to(tl.int64), ALIGN)
    stride_h = tl.multiple_of(value(x.strides[1]).to(tl.int64), ALIGN)
    stride_t = tl.multiple_of(value(x.strides[2]).to(tl.int64), ALIGN)
    return x.ptr + b * stride_b + token * stride_t + head * stride_h


@triton.jit
def _load_rotated(rows, keep, position, rotary, const: tl.constexpr):
    """Rows as fp32 [R, COLS], rotated to their positions; 0 past WIDTH. PAIRS = 0: not rotated."""
    PAIRS: tl.constexpr = const.PAIRS
    cols = tl.arange(0, const.COLS)
    within = keep[:, None] & (cols < const.WIDTH)[None, :]
    x = tl.load(rows[:, None] + cols[None, :], mask=within, other=0.0).to(tl.float32)
    if PAIRS > 0:
        if const.INTERLEAVED:
            pair = cols // 2
            partner = cols ^ 1
            second = cols % 2 == 1
        else:
            second = cols >= PAIRS
            pair = tl.where(second, cols - PAIRS, cols)
            partner = tl.where(second, cols - PAIRS, cols + PAIRS)
        turns = cols < 2 * PAIRS
        turned = keep[:, None] & turns[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        # Positions past the tables are not rotated.
        reached = (position >= 0) & (position < value(rotary.positions))
        in_table = turned & reached[:, None]
        angle = position.to(tl.int64)[:, None] * PAIRS + pair[None, :]
        cos = tl.load(rotary.cos_ptr + angle, mask=in_table, other=1.0)
        sin = tl.load(rotary.sin_ptr + angle, mask=in_table, other=0.0)
        other = tl.where(second[None, :], other, -other)
        x = tl.where(turns[None, :], x * cos + other * sin, x)
    return x


@triton.jit
def _store_rows(store, x, at, const: tl.constexpr):
    """Write rows [R, COLS] to their `Places`, as codes if the buffer has scales.

    A scale shared by tokens is given, and larger numbers saturate.
    """
    keep = at.keep
    if store.scale_ptr is not None:
        LARGEST: tl.constexpr = 448.0 if const.E4M3 else 127.0
        scale_ptrs = store.scale_ptr + scale_places(store, at.page, at.slot, at.head, at.pages)
        if store.shared is not None:
            scale = tl.load(scale_ptrs, mask=keep, other=1.0)
        else:
            scale = row_scale(x, LARGEST)
            tl.store(scale_ptrs, scale, mask=keep)
        ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if store.shared is not None:
            ratio = tl.where(ratio > LARGEST, LARGEST, ratio)
            ratio = tl.where(ratio < -LARGEST, -LARGEST, ratio)
        numbers = to_e4m3(ratio) if const.E4M3 else to_int8(ratio)
    else:
        numbers = x.to(store.ptr.dtype.element_ty)
    ALIGN: tl.constexpr = 8 * const.ROW_BYTES // store.ptr.dtype.element_ty.primitive_bitwidth
    places = tl.multiple_of(row_places(at.page, at.slot, at.head, store.strides), ALIGN)
    cols = tl.arange(0, const.COLS)
    pointers = store.ptr + places[:, None] + cols[None, :]
    tl.store(pointers, numbers, mask=keep[:, None] & (cols < const.WIDTH)[None, :])


@triton.jit
def _span(b, T, lengths_ptr, new_lengths_ptr, batch_index_ptr, rows, ADVANCE: tl.constexpr):
    """`_Span` of batch row b."""
    row = b
    exists = True
    if batch_index_ptr is not None:
        index = tl.load(batch_index_ptr + b)
        exists = (index >= 0) & (index < rows)
        row = index.to(tl.int32)
    count = T
    if new_lengths_ptr is not None:
        count = int32_within(tl.load(new_lengths_ptr + b), 0, T)
    first = tl.load(lengths_ptr + row, mask=exists, other=0)
    if not ADVANCE:
        first -= count
    return _Span(row, exists, first, count)


@triton.jit
def _place(span, token, T, pages):
    """Page and slot of new tokens of a row, whether they are stored, and positions."""
    position = span.first + token
    keep = span.exists & (token < T) & lasting(position, span.first + span.count, pages)
    # Lengths are on the device, so the host cannot refuse tokens that do not fit.
    keep = keep & has_slot(position, pages)
    page, slot = locate(span.row, position, keep, pages)
    if pages.block_table_ptr is not None:
        keep = keep & in_pool(page, pages)
    return page, slot, keep, position


@triton.jit
def _given_place(token, T, slots, pages):
    """`_place` for tokens with given slots."""
    within = token < T
    position = tl.load(slots.ptr + token, mask=within, other=-1)
    size = value(pages.page_size)
    keep = (position >= 0) & (position < value(pages.page_count).to(tl.int64) * size)
    page = (position // size).to(tl.int32)
    slot = (position % size).to(tl.int32)
    return page, slot, keep, _given_position(token, within, slots)


@triton.jit
def _given_position(token, within, slots):
    position = token
    if slots.positions_ptr is not None:
        position = tl.load(slots.positions_ptr + token, mask=within, other=0)
    return position


@triton.jit
def _append(tokens, store, rotary, pages, b, span, slots, T, tile, const: tl.constexpr):
    """Store BLOCK (token, head) pairs of k or v in their slots."""
    H = value(tokens.heads)
    pair = tile * const.BLOCK + tl.arange(0, const.BLOCK)
    token = pair // H
    head = pair % H
    if slots is None:
        page, slot, keep, position = _place(span, token, T, pages)
    else:
        page, slot, keep, position = _given_place(token, T, slots, pages)
    rows = _token_pointers(tokens, b, token, head, const.ALIGN)
    x = _load_rotated(rows, keep, position, rotary, const)
    # Quantise the rounded number, as an unquantised cache would store it.
    x = x.to(tokens.ptr.dtype.element_ty).to(tl.float32)
    _store_rows(store, x, Places(pages, page, slot, head, keep), const)


@triton.jit
def _turn(q, o, rotary, b, first, slots, T, tile, const: tl.constexpr):
    """Rotate BLOCK (token, head) pairs of q into o."""
    H = value(q.heads)
    pair = tile * const.BLOCK + tl.arange(0, const.BLOCK)
    token = pair // H
    head = pair % H
    keep = token < T
    position = first + token
    if slots is not None:
        position = _given_position(token, keep, slots)
    rows = _token_pointers(q, b, token, head, const.ALIGN)
    x = _load_rotated(rows, keep, position, rotary, const)
    cols = tl.arange(0, const.COLS)
    out = _token_pointers(o, b, token, head, const.ALIGN)[:, None] + cols[None, :]
    tl.store(out, x.to(o.ptr.dtype.element_ty), mask=keep[:, None] & (cols < const.WIDTH)[None, :])


@triton.jit(do_not_specialize=["T", "rows", "programs"])
def append_kernel(
    q, o, k, v, k_store, v_store, rotary, pages,
    lengths_ptr, new_lengths_ptr, batch_index_ptr, counters_ptr, slots, T, rows, programs,
    const: tl.constexpr, of_v: tl.constexpr,
):  # fmt: skip
    """A tile of k, v or q. 1-D grid: the tiles of k, then those of v, then those of q, `programs`
    together; batch rows.
    """
    tile = tl.program_id(0) % programs
    b = tl.program_id(0) // programs
    span = _Span(b, True, 0, T)
    if slots is None:
        span = _span(b, T, lengths_ptr, new_lengths_ptr, batch_index_ptr, rows, const.ADVANCE)
    tiles = tl.cdiv(T * value(k.heads), const.BLOCK)
    before_q = tiles if v is None else 2 * tiles
    if tile < tiles:
        _append(k, k_store, rotary, pages, b, span, slots, T, tile, const)
    elif tile < before_q:
        if v is not None:
            _append(v, v_store, rotary, pages, b, span, slots, T, tile - tiles, of_v)
    else:
        if q is not None:
            _turn(q, o, rotary, b, span.first, slots, T, tile - before_q, const)
    if const.ADVANCE:
        # The row's last program updates the length, after all others have read it.
        tl.debug_barrier()
        before = tl.atomic_add(counters_ptr + span.row, 1, mask=span.exists)
        if span.exists & (before == programs - 1):
            tl.store(lengths_ptr + span.row, span.first + span.count)
            tl.store(counters_ptr + span.row, 0)


def launch_append(
    q: Tensor | None, k: Tensor, v: Tensor | None, new_lengths: Tensor | None, cache: CacheTensors,
    cos: Tensor | None, sin: Tensor | None, *, interleaved: bool, advance: bool,
    slots: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Write k [B, H_k, T, D] and v [B, H_v, T, D_v] into the cache; q rotated, in q's memory order.

    H_v is H_k at most. v = None: keys hold the values.

    cos and sin are fp32 [N, R // 2], contiguous. Only the first new_lengths[b] tokens of a row are
    written. `advance`: add them to cache.lengths; otherwise the lengths already include them.
    slots, positions: int [T] of one batch row: where tokens go, in place of lengths and table.
    """
    B, H_k, T, D = k.shape
    k, v = _dense_rows(k), None if v is None else _dense_rows(v)
    D_v = D if v is None else v.shape[3]
    o = None
    if q is not None:
        q = _dense_rows(q)
        o = empty_in_layout(q, *q.shape[1:])
    if B * T == 0:
        return o
    by_slots = slots is not None
    assert by_slots or cache.lengths is not None, "append needs the cache's lengths"
    BLOCK_D, BLOCK_DV = block_dim(D), block_dim(D_v)
    BLOCK = max(1, _TILE // max(BLOCK_D, BLOCK_DV))
    programs = (1 if v is None else 2) * blocks(T * H_k, BLOCK)
    programs += 0 if q is None else blocks(T * q.shape[1], BLOCK)
    tensors = [x for x in (q, o, k, v) if x is not None]
    e4m3 = cache.k.dtype == torch.float8_e4m3fn
    rest = (interleaved, e4m3, advance, row_bytes(cache), _alignment(tensors), BLOCK)
    append_kernel[(programs * B,)](
        *map(_tokens, (q, o, k, v)),
        *map(stored, (cache.k, cache.v), (cache.k_scale, cache.v_scale)),
        None if cos is None else _Rotary(cos, sin, runtime_int(cos.shape[0])),
        pages_of(cache),
        *(cache.lengths, new_lengths, cache.batch_index, cache.counters),
        _Slots(slots, positions) if by_slots else None,
        T,
        0 if cache.lengths is None else cache.lengths.shape[0],
        programs,
        _Constants(D, BLOCK_D, 0 if cos is None else cos.shape[1], *rest),
        _Constants(D_v, BLOCK_DV, 0, *rest),
        # Without fused multiply-adds rotated keys are bitwise equal to torch's.
        num_warps=4,
        enable_fp_fusion=False,
    )
    return o


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else copied(x)


def _tokens(x: Tensor | None) -> _Tokens | None:
    return None if x is None else _Tokens(x, strides(x), runtime_int(x.shape[1]))


def _alignment(tensors: list[Tensor]) -> int:
    """Elements that divide every stride: 16 bytes if possible, else 1."""
    elements = 16 // tensors[0].element_size()
    for x in tensors:
        for size, step in zip(x.shape[:3], x.stride()[:3], strict=True):
            if size > 1 and step % elements:
                return 1
    return elements
