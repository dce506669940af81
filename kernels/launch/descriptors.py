"""TMA descriptors, with which one thread requests a block of rows from hardware."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def tma_strides(x: Tensor) -> list[int] | None:
    """Strides of [B, H, T, D] for TMA, or None if TMA does not support x.

    Rows must be 16-byte aligned. Strides of dims of size 1 are arbitrary in torch, but not here; a
    stride of 0, of an expanded tensor, is not supported.
    """
    elements = 16 // x.element_size()
    if x.numel() == 0 or x.data_ptr() % 16 or (x.stride(3) != 1 and x.shape[3] > 1):
        return None
    steps = zip(x.shape[:3], x.stride()[:3], strict=True)
    strides = [stride if size > 1 else elements for size, stride in steps]
    return [*strides, 1] if min(strides) > 0 and not any(s % elements for s in strides) else None


def descriptor_like(x: Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """Descriptor of blocks [rows, cols] of a head in the layout of x, or None; 0 out of bounds."""
    strides = tma_strides(x)
    if strides is None:
        return None
    descriptor = TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols])
    descriptor.base = None  # a cached plan outlives its tensors
    return descriptor


def descriptor_of(x: Tensor, like: TensorDescriptor) -> TensorDescriptor:
    """The descriptor of x, which has the layout of `like`'s tensor."""
    descriptor: TensorDescriptor = object.__new__(type(like))
    # Without the checks done for `like`, which would take several times as long.
    descriptor.__dict__.update(like.__dict__)
    descriptor.base = x
    return descriptor
