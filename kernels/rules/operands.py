"""Operands in memory: tensors with their strides, and heads in them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Strided(NamedTuple):
    """A tensor [B, H, T, width]; batch, head and row stride in elements, as `runtime_int`s."""

    ptr: Any
    strides: Any


@triton.jit
def row_pointers(x, b, h, t, ALIGN: tl.constexpr):
    """Pointers to rows of heads h, [M] or a scalar, at tokens t; ALIGN elements are promised."""
    stride_b = tl.multiple_of((x.strides[0] >> 2).to(tl.int64), ALIGN)
    stride_h = tl.multiple_of((x.strides[1] >> 2).to(tl.int64), ALIGN)
    stride_t = tl.multiple_of((x.strides[2] >> 2).to(tl.int64), ALIGN)
    return x.ptr + b * stride_b + h * stride_h + t * stride_t


class Head(NamedTuple):
    """Pointer to a row of a head, and the stride between rows."""

    ptr: Any
    stride: Any


@triton.jit
def head(ptr, b, h, first, strides, INDEX: tl.constexpr):
    """`Head` from row `first` on of head h in batch row b; None without a pointer.

    strides are (batch, head, row) in elements, as `runtime_int`s; the launcher guarantees that 16
    bytes divide each, for vector loads. INDEX is the type of offsets inside a tile: 32 bits take
    half the registers of 64.
    """
    rows = None
    if ptr is not None:
        ALIGN: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
        # `value` inlined by hand, as inlining loses hints on a call's result.
        stride_b = tl.multiple_of((strides[0] >> 2).to(tl.int64), ALIGN)
        stride_h = tl.multiple_of((strides[1] >> 2).to(tl.int64), ALIGN)
        stride_t = tl.multiple_of((strides[2] >> 2).to(INDEX), ALIGN)
        ptr = ptr + b * stride_b + h * stride_h + tl.cast(first, tl.int64) * stride_t
        rows = Head(ptr, stride_t)
    return rows


@triton.jit
def head_at(ptr, b, h, first, strides, const: tl.constexpr):
    """`head` with the offsets that the kernel is compiled for."""
    INDEX: tl.constexpr = tl.int64 if const.FAR else tl.int32
    return head(ptr, b, h, first, strides, INDEX)
