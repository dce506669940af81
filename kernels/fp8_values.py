"""Values in 8 bits as the Hopper forward reads them: keys contiguous, in the order of `key_at`.

A product in 8 bits wants the dimension that it sums over contiguous in both operands, which for
P V is that of the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import aligned, blocks, strides
from .rules.codes import key_at
from .rules.tile import head

_KEYS = tl.constexpr(128)


@triton.jit
def store_packed(codes, packed_ptr, of_head, first, sixteens, KEYS: tl.constexpr, D: tl.constexpr):
    """Write codes [KEYS, D] of keys first..., which stand in the order of `key_at`.

    packed [heads, D, 16 sixteens]: so written, the compiler sees where rows start.
    """
    length = sixteens * 16
    places = first + tl.arange(0, KEYS)
    row = tl.cast(of_head, tl.int64) * D + tl.arange(0, D)
    pointers = packed_ptr + (row * length)[:, None] + places[None, :]
    tl.store(pointers, tl.trans(codes), mask=(places < length)[None, :])


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def pack_values_kernel(v_ptr, v_strides, packed_ptr, T, H, sixteens, D: tl.constexpr):
    """packed [B, H, D, 16 sixteens] of v [B, H, T, D], as bytes; zeros where there is no key.

    A program for each 128 keys of a head.
    """
    tiles = tl.cdiv(T, _KEYS)
    program = tl.program_id(0)
    of_head = program // tiles
    b = of_head // H
    first = (program - of_head * tiles) * _KEYS
    v_ptr, stride = head(v_ptr, b, of_head - b * H, first, v_strides, tl.int64)
    keys = key_at(tl.arange(0, _KEYS))
    pointers = v_ptr + (keys * stride)[:, None] + tl.arange(0, D)[None, :]
    codes = tl.load(pointers, mask=(first + keys < T)[:, None], other=0)
    store_packed(codes, packed_ptr, of_head, first, sixteens, _KEYS, D)


def packed_like(v: Tensor) -> Tensor:
    """Empty bytes [B, H, D, T'] for v [B, H, T, D], T' whole sixteens: TMA reads from there."""
    B, H, T, D = v.shape
    return torch.empty(B, H, D, 16 * blocks(T, 16), dtype=torch.uint8, device=v.device)


def launch_pack_values(v: Tensor) -> Tensor:
    """v [B, H, T, D], of 8 bits and D a power of two, packed: [B, H, D, T'], T' whole sixteens."""
    B, H, T, D = v.shape
    packed = packed_like(v)
    if packed.numel():
        codes = aligned(v).view(torch.uint8)
        pack_values_kernel[(B * H * blocks(T, _KEYS.value),)](
            codes, strides(codes), packed, T, H, blocks(T, 16), D, num_warps=4
        )
    return packed.view(v.dtype)
