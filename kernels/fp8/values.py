"""Packed FP8 values for the Hopper forward: contiguous along keys, in the order of `key_at`.

An FP8 product needs both operands contiguous along the summed dim, which for P V are the keys. Each
packed sequence starts at its own group of 16 keys, as in the order of `key_at` a tile can start
only there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.arguments import aligned, strided, tiles_of
from ..rules.codes import key_at
from ..rules.integers import runtime_int
from ..rules.mask import Mask
from ..rules.operands import head
from ..rules.tile import batch_row, first_slot, key_program, memory_rows

_KEYS = tl.constexpr(128)
# TMA needs 16-byte alignment, and `key_at` permutes groups of 16 keys.
TOGETHER = tl.constexpr(16)


@triton.jit
def first_packed(b, first, mask):
    """Start of batch row b's packed values; `first`: start of its keys in memory."""
    return first_slot(b, first, mask, TOGETHER)


@triton.jit
def store_packed(
    codes, packed_ptr, of_head, first, row, first_k, sixteens, mask,
    KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write codes [KEYS, D] of keys first... of a batch row, which are in the order of `key_at`.

    packed [heads, D, 16 sixteens], in this form so that the compiler knows the alignment of rows.
    first_k: start of the batch row in memory.
    """
    length = sixteens * TOGETHER
    places = first + tl.arange(0, KEYS)
    exists = places < tl.cdiv(row.T_k, TOGETHER) * TOGETHER
    places += first_packed(row.b, first_k, mask)
    numbers = tl.cast(of_head, tl.int64) * D + tl.arange(0, D)
    pointers = packed_ptr + (numbers * length)[:, None] + places[None, :]
    tl.store(pointers, tl.trans(codes), mask=exists[None, :])


@triton.jit(do_not_specialize=["T", "H", "sixteens"])
def pack_values_kernel(v, packed_ptr, T, H, sixteens, mask, D: tl.constexpr):
    """Pack v [B, H, T, D] as bytes [B, H, D, 16 sixteens], with zeros where there is no key.

    One program per 128 keys of a head. Gaps between packed sequences may stay unwritten.
    """
    tile, b, h = key_program(T, H, mask, _KEYS)
    row = batch_row(b, T, T, mask)
    batch, _first_q, first_k = memory_rows(b, T, T, mask)
    first = tile * _KEYS
    v_ptr, stride = head(v.ptr, batch, h, first_k + first, v.strides, tl.int64)
    keys = key_at(tl.arange(0, _KEYS))
    pointers = v_ptr + (keys * stride)[:, None] + tl.arange(0, D)[None, :]
    codes = tl.load(pointers, mask=(first + keys < row.T_k)[:, None], other=0)
    of_head = batch * H + h
    store_packed(codes, packed_ptr, of_head, first, row, first_k, sixteens, mask, _KEYS, D)


def rows_of(cu_seqlens: Tensor | None, lengths: Tensor | None = None) -> Mask:
    """Mask of a tensor's batch rows, or its packed sequences, and their lengths."""
    sequences = None if cu_seqlens is None else runtime_int(cu_seqlens.shape[0] - 1)
    return Mask(cu_q_ptr=cu_seqlens, cu_k_ptr=cu_seqlens, sequences=sequences, lengths_ptr=lengths)


def packed_like(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Empty bytes [B, H, D, T'] for v [B, H, T, D], T' a multiple of 16, as TMA needs."""
    B, H, T, D = v.shape
    length = TOGETHER.value * tiles_of(cu_seqlens, 1, T, TOGETHER.value)
    return v.new_empty(B, H, D, length, dtype=torch.uint8)


def launch_pack_values(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Pack 8-bit v [B, H, T, D], D a power of two: [B, H, D, T'], T' a multiple of 16.

    cu_seqlens: int [N + 1], contiguous, of packed sequences; B is 1 then.
    """
    B, H, T, D = v.shape
    packed = packed_like(v, cu_seqlens)
    if packed.numel():
        codes = aligned(v).view(torch.uint8)
        pack_values_kernel[(H * tiles_of(cu_seqlens, B, T, _KEYS.value),)](
            strided(codes),
            packed,
            T,
            H,
            packed.shape[3] // TOGETHER.value,
            rows_of(cu_seqlens),
            D,
            num_warps=4,
        )
    return packed.view(v.dtype)
