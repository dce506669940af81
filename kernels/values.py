"""Values in 8 bits as the Hopper forward reads them: keys contiguous, in the order of `key_at`.

A product in 8 bits wants the dimension that it sums over contiguous in both operands, which for
P V is that of the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import aligned, blocks, strides
from .quantize import key_at
from .tile import head

_TILE = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def pack_values_kernel(v_ptr, v_strides, packed_ptr, T, H, sixteens, D: tl.constexpr):
    """packed [B, H, D, 16 sixteens] of v [B, H, T, D], as bytes; zeros where there is no key.

    A program for each 128 keys of a head.
    """
    # Written so that the compiler sees where rows start.
    T_packed = sixteens * 16
    tiles = tl.cdiv(T_packed, _TILE)
    program = tl.program_id(0)
    of_head = program // tiles
    b = of_head // H
    first = (program - of_head * tiles) * _TILE
    v_ptr, stride = head(v_ptr, b, of_head - b * H, first, v_strides, tl.int64)
    places = tl.arange(0, _TILE)
    keys = key_at(places)
    cols = tl.arange(0, D)
    pointers = v_ptr + (keys * stride)[:, None] + cols[None, :]
    codes = tl.load(pointers, mask=(first + keys < T)[:, None], other=0)
    packed_ptr += tl.cast(of_head, tl.int64) * D * T_packed + first
    pointers = packed_ptr + (cols * tl.cast(T_packed, tl.int64))[:, None] + places[None, :]
    tl.store(pointers, tl.trans(codes), mask=(first + places < T_packed)[None, :])


def launch_pack_values(v: Tensor) -> Tensor:
    """v [B, H, T, D], of 8 bits and D a power of two, packed: [B, H, D, T'], T' whole sixteens."""
    B, H, T, D = v.shape
    # TMA wants rows that start at multiples of 16 bytes.
    sixteens = blocks(T, 16)
    packed = torch.empty(B, H, D, 16 * sixteens, dtype=torch.uint8, device=v.device)
    if packed.numel():
        codes = aligned(v).view(torch.uint8)
        programs = B * H * blocks(T, _TILE.value)
        pack_values_kernel[(programs,)](
            codes, strides(codes), packed, T, H, sixteens, D, num_warps=4
        )
    return packed.view(v.dtype)
