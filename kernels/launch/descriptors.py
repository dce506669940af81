"""TMA descriptors, by which one thread asks for a block of rows and hardware brings it."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def tma_strides(x: Tensor) -> list[int] | None:
    """Strides of [B, H, T, D] as TMA takes them, or None where it cannot walk x.

    Rows have to start at multiples of 16 bytes. A stride that is never taken may be anything in
    torch, but not here; one of 0, of a tensor that was expanded, is not served.
    """
    elements = 16 // x.element_size()
    if x.numel() == 0 or x.data_ptr() % 16 or (x.stride(3) != 1 and x.shape[3] > 1):
        return None
    steps = zip(x.shape[:3], x.stride()[:3], strict=True)
    strides = [stride if size > 1 else elements for size, stride in steps]
    return [*strides, 1] if min(strides) > 0 and not any(s % elements for s in strides) else None


def descriptor_like(x: Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """Blocks of `rows` rows and `cols` columns of a head, for tensors that lie in memory as x does.

    What lies outside of x reads as 0. None where TMA cannot walk such a tensor.
    """
    strides = tma_strides(x)
    if strides is None:
        return None
    descriptor = TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols])
    descriptor.base = None  # a plan is kept for longer than the tensors it was made for
    return descriptor


def descriptor_of(x: Tensor, like: TensorDescriptor) -> TensorDescriptor:
    """The descriptor of x, which lies in memory as what `like` was made for does."""
    descriptor: TensorDescriptor = object.__new__(type(like))
    # Checked when `like` was made; to check again takes the host several times what this does.
    descriptor.__dict__.update(like.__dict__)
    descriptor.base = x
    return descriptor
