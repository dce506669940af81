"""Values in 8 bits as the Hopper forward reads them: keys contiguous, in the order of `key_at`.

A product in 8 bits wants the dimension that it sums over contiguous in both operands, which for
P V is that of the keys. Packed sequences begin with a 16 of keys of their own each: in the order of
`key_at` a tile can begin nowhere else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import aligned, strides, tiles_of
from .rules.codes import key_at
from .rules.integers import runtime_int
from .rules.mask import Mask
from .rules.tile import batch_row, first_slot, head, key_program, memory_rows

_KEYS = tl.constexpr(128)
# TMA reads from multiples of 16 bytes, and the order of `key_at` is one of 16 keys.
TOGETHER = tl.constexpr(16)


@triton.jit
def first_packed(b, first, mask):
    """Where the packed values of batch row b begin; `first`: where its keys begin in memory."""
    return first_slot(b, first, mask, TOGETHER)


@triton.jit
def store_packed(
    codes, packed_ptr, of_head, first, row, first_k, sixteens, mask,
    KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write codes [KEYS, D] of keys first... of a batch row, which stand in the order of `key_at`.

    packed [heads, D, 16 sixteens]: so written, the compiler sees where rows start. first_k: where
    the batch row begins in memory.
    """
    length = sixteens * TOGETHER
    places = first + tl.arange(0, KEYS)
    exists = places < tl.cdiv(row.T_k, TOGETHER) * TOGETHER
    places += first_packed(row.b, first_k, mask)
    numbers = tl.cast(of_head, tl.int64) * D + tl.arange(0, D)
    pointers = packed_ptr + (numbers * length)[:, None] + places[None, :]
    tl.store(pointers, tl.trans(codes), mask=exists[None, :])


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def pack_values_kernel(v_ptr, v_strides, packed_ptr, T, H, sixteens, mask, D: tl.constexpr):
    """packed [B, H, D, 16 sixteens] of v [B, H, T, D], as bytes; zeros where there is no key.

    A program for each 128 keys of a head. Between packed sequences it may leave what there was.
    """
    tile, b, h = key_program(T, H, mask, _KEYS)
    row = batch_row(b, T, T, mask)
    batch, _first_q, first_k = memory_rows(b, mask)
    first = tile * _KEYS
    v_ptr, stride = head(v_ptr, batch, h, first_k + first, v_strides, tl.int64)
    keys = key_at(tl.arange(0, _KEYS))
    pointers = v_ptr + (keys * stride)[:, None] + tl.arange(0, D)[None, :]
    codes = tl.load(pointers, mask=(first + keys < row.T_k)[:, None], other=0)
    of_head = batch * H + h
    store_packed(codes, packed_ptr, of_head, first, row, first_k, sixteens, mask, _KEYS, D)


def rows_of(cu_seqlens: Tensor | None, lengths: Tensor | None = None) -> Mask:
    """The batch rows of one tensor, or its packed sequences, and which of their rows count."""
    sequences = None if cu_seqlens is None else runtime_int(cu_seqlens.shape[0] - 1)
    return Mask(cu_q_ptr=cu_seqlens, cu_k_ptr=cu_seqlens, sequences=sequences, lengths_ptr=lengths)


def packed_like(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Empty bytes [B, H, D, T'] for v [B, H, T, D], T' whole sixteens: TMA reads from there."""
    B, H, T, D = v.shape
    length = TOGETHER.value * tiles_of(cu_seqlens, 1, T, TOGETHER.value)
    return torch.empty(B, H, D, length, dtype=torch.uint8, device=v.device)


def launch_pack_values(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """v [B, H, T, D], of 8 bits and D a power of two, packed: [B, H, D, T'], T' whole sixteens.

    cu_seqlens: int [N + 1], contiguous, of packed sequences; B is 1 then.
    """
    B, H, T, D = v.shape
    packed = packed_like(v, cu_seqlens)
    if packed.numel():
        codes = aligned(v).view(torch.uint8)
        pack_values_kernel[(H * tiles_of(cu_seqlens, B, T, _KEYS.value),)](
            codes,
            strides(codes),
            packed,
            T,
            H,
            packed.shape[3] // TOGETHER.value,
            rows_of(cu_seqlens),
            D,
            num_warps=4,
        )
    return packed.view(v.dtype)
