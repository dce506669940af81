"""Quantise heads to e4m3 with one fp32 scale each, in two passes.

The first pass computes the largest magnitude of every tile of rows, the second reduces these to a
head's and writes codes: in the input's layout, or packed as in `values`. Packed sequences have
separate tiles and scales.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.arguments import aligned, block_dim, empty_in_layout, strided, tiles_of
from ..rules.codes import key_at, row_scale, to_e4m3
from ..rules.operands import head
from ..rules.tile import (
    batch_row,
    clear_output,
    ends_of,
    key_program,
    load_at,
    memory_rows,
    store_tile,
)
from .values import TOGETHER, packed_like, rows_of, store_packed

# Maxima reduced at once.
_MAXIMA = tl.constexpr(128)
# Elements of a tile, which fits the registers of four warps.
_TILE = 8192


class TileIndex(NamedTuple):
    """Rows of a program: tile number `tile` of head h of batch row `row`.

    first: its first row. b, first_k: start of the batch row in memory.
    """

    tile: Any
    h: Any
    row: Any
    first: Any
    b: Any
    first_k: Any


@triton.jit
def _tile(
    x, T, H, mask, ORDERED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """This program's rows in fp32, 0 for padding, and their `TileIndex`.

    ORDERED: rows are in the order of `key_at`.
    """
    tile, b, h = key_program(T, H, mask, ROWS)
    row = batch_row(b, T, T, mask)
    batch, _first_q, first_k = memory_rows(b, T, T, mask)
    first = tile * ROWS
    rows = tl.arange(0, ROWS)
    if ORDERED:
        rows = key_at(rows)
    ptr, stride = head(x.ptr, batch, h, first_k + first, x.strides, tl.int64)
    pointers = ptr + (rows * stride)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    x = load_at(pointers, first + rows < row.end, BLOCK_D, D).to(tl.float32)
    return x, TileIndex(tile, h, row, first, batch, first_k)


@triton.jit(do_not_specialize=["T", "H"])
def head_maxima_kernel(
    x, maxima_ptr, T, H, mask, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write the largest magnitude of each program's tile of ROWS rows."""
    x, _place = _tile(x, T, H, mask, False, ROWS, D, BLOCK_D)
    # tl.max drops NaN; adding x * 0 propagates NaN and infinity.
    largest = tl.max(tl.max(tl.abs(x), 1), 0) + tl.sum(tl.sum(x * 0.0, 1), 0)
    tl.store(maxima_ptr + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def head_codes_kernel(
    x, maxima_ptr, codes_out, scale_ptr, T, H, sixteens, mask,
    PACKED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write codes, as bytes, and scale [batch rows, H] from `head_maxima_kernel`'s maxima."""
    x, at = _tile(x, T, H, mask, PACKED, ROWS, D, BLOCK_D)
    first, row = at.first, at.row
    # Tiles of a head are adjacent.
    maxima_ptr += tl.program_id(0) - at.tile
    tiles = tl.cdiv(row.T_k, ROWS)
    numbers = tl.arange(0, _MAXIMA)
    largest = tl.zeros([_MAXIMA], tl.float32)
    for start in range(0, tiles, _MAXIMA):
        more = start + numbers
        more = tl.load(maxima_ptr + more, mask=more < tiles, other=0.0)
        largest = tl.where(more > largest, more, largest) + more * 0.0
    scale = row_scale(largest[None, :], 448.0)
    if first == 0:
        tl.store(scale_ptr + row.b * H + at.h + tl.arange(0, 1), scale)
    codes = to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]))
    if PACKED:
        out_ptr = codes_out.ptr
        store_packed(
            codes, out_ptr, at.b * H + at.h, first, row, at.first_k, sixteens, mask, ROWS, D
        )
    else:
        ends = ends_of(mask.cu_k_ptr, mask, T)
        clear_output(codes_out.ptr, codes_out.strides, tl.arange(0, BLOCK_D), D, H, ends)
        out = head(codes_out.ptr, at.b, at.h, at.first_k, codes_out.strides, tl.int64)
        exists = first + tl.arange(0, ROWS) < row.T_k
        store_tile(out, first, codes, exists, ROWS, BLOCK_D, D)


def launch_head_codes(
    x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [B, H, T, D] in its memory order, or packed, and scale fp32 [B, H].

    D is a multiple of 16, for packed codes a power of two; x is not empty. lengths int [B],
    contiguous: rows past them have codes 0. cu_seqlens: int [N + 1], contiguous, of N >= 1 packed
    sequences: B is 1, lengths are [N] and scale is [N, H].
    """
    B, H, T, D = x.shape
    x = aligned(x)
    BLOCK_D = block_dim(D)
    ROWS = min(128, max(16, _TILE // BLOCK_D))
    programs = H * tiles_of(cu_seqlens, B, T, ROWS)
    maxima = x.new_empty(programs, dtype=torch.float32)
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scale = x.new_empty(rows, H, dtype=torch.float32)
    codes = packed_like(x, cu_seqlens) if packed else empty_in_layout(x, H, T, D, torch.uint8)
    mask = rows_of(cu_seqlens, lengths)
    head_maxima_kernel[(programs,)](strided(x), maxima, T, H, mask, ROWS, D, BLOCK_D, num_warps=4)
    head_codes_kernel[(programs,)](
        strided(x),
        maxima,
        strided(codes),
        scale,
        T,
        H,
        tiles_of(cu_seqlens, 1, T, TOGETHER.value),
        mask,
        packed,
        ROWS,
        D,
        BLOCK_D,
        num_warps=4,
    )
    return codes.view(torch.float8_e4m3fn), scale
