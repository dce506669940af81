"""e4m3 codes of heads: one fp32 scale for each, in two passes over the numbers.

The first leaves the largest magnitude of every tile of rows, the second finds that of a head among
them, and writes codes: where the numbers stood, or packed as `values` has it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_values import packed_like, store_packed
from .launch.arguments import aligned, block_dim, blocks, empty_in_layout, strides
from .rules.codes import key_at, row_scale, to_e4m3
from .rules.tile import head, load_at, store_tile

# Maxima that are compared at once.
_MAXIMA = tl.constexpr(128)
# Numbers of a tile, for what the registers of four warps hold.
_TILE = 8192


@triton.jit
def _tile(
    x_ptr,
    x_strides,
    lengths_ptr,
    T,
    H,
    ORDERED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """This program's rows in fp32, 0 where none count: (x, b, h, head over all, first, tiles).

    ORDERED: the rows stand in the order of `key_at`.
    """
    tiles = tl.cdiv(T, ROWS)
    program = tl.program_id(0)
    of_head = program // tiles
    first = (program - of_head * tiles) * ROWS
    b = of_head // H
    end = T
    if lengths_ptr is not None:
        end = tl.minimum(tl.load(lengths_ptr + b), T).to(tl.int32)
    rows = tl.arange(0, ROWS)
    if ORDERED:
        rows = key_at(rows)
    ptr, stride = head(x_ptr, b, of_head - b * H, first, x_strides, tl.int64)
    pointers = ptr + (rows * stride)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    x = load_at(pointers, first + rows < end, BLOCK_D, D).to(tl.float32)
    return x, b, of_head - b * H, of_head, first, tiles


@triton.jit(do_not_specialize=["T", "H"])
def head_maxima_kernel(
    x_ptr, x_strides, lengths_ptr, maxima_ptr, T, H,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """maxima [B * H * tiles] of ROWS rows each. A program for each tile."""
    x, _b, _h, _head, _first, _tiles = _tile(
        x_ptr, x_strides, lengths_ptr, T, H, False, ROWS, D, BLOCK_D
    )
    # tl.max drops NaN; times zero, what is not finite is NaN, and all else adds nothing.
    largest = tl.max(tl.max(tl.abs(x), 1), 0) + tl.sum(tl.sum(x * 0.0, 1), 0)
    tl.store(maxima_ptr + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def head_codes_kernel(
    x_ptr, x_strides, lengths_ptr, maxima_ptr, codes_ptr, codes_strides, scale_ptr, T, H, sixteens,
    PACKED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """codes, as bytes, and scale [B * H] from what `head_maxima_kernel` left."""
    x, b, h, of_head, first, tiles = _tile(
        x_ptr, x_strides, lengths_ptr, T, H, PACKED, ROWS, D, BLOCK_D
    )
    numbers = tl.arange(0, _MAXIMA)
    largest = tl.zeros([_MAXIMA], tl.float32)
    for start in range(0, tiles, _MAXIMA):
        more = start + numbers
        more = tl.load(maxima_ptr + of_head * tiles + more, mask=more < tiles, other=0.0)
        largest = tl.where(more > largest, more, largest) + more * 0.0
    scale = row_scale(largest[None, :], 448.0)
    if first == 0:
        tl.store(scale_ptr + of_head + tl.arange(0, 1), scale)
    codes = to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]))
    if PACKED:
        store_packed(codes, codes_ptr, of_head, first, sixteens, ROWS, D)
    else:
        ptr, stride = head(codes_ptr, b, h, 0, codes_strides, tl.int64)
        exists = first + tl.arange(0, ROWS) < T
        store_tile(ptr, stride, first, codes, exists, ROWS, BLOCK_D, D)


def launch_head_codes(x: Tensor, lengths: Tensor | None, packed: bool) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [B, H, T, D] in its memory order, or packed, and scale fp32 [B, H].

    D is a multiple of 16, of packed codes a power of two; there is at least one number. lengths
    int [B], contiguous: of other rows the codes are 0.
    """
    B, H, T, D = x.shape
    x = aligned(x)
    BLOCK_D = block_dim(D)
    ROWS = min(128, max(16, _TILE // BLOCK_D))
    programs = B * H * blocks(T, ROWS)
    maxima = torch.empty(programs, dtype=torch.float32, device=x.device)
    scale = torch.empty(B, H, dtype=torch.float32, device=x.device)
    codes = packed_like(x) if packed else empty_in_layout(x, H, T, D, torch.uint8)
    head_maxima_kernel[(programs,)](
        x, strides(x), lengths, maxima, T, H, ROWS, D, BLOCK_D, num_warps=4
    )
    head_codes_kernel[(programs,)](
        x,
        strides(x),
        lengths,
        maxima,
        codes,
        strides(codes),
        scale,
        T,
        H,
        blocks(T, 16),
        packed,
        ROWS,
        D,
        BLOCK_D,
        num_warps=4,
    )
    return codes.view(torch.float8_e4m3fn), scale
