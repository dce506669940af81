"""Merge two results of attention by kernels."""

from torch import Tensor

from .. import kernels
from . import flops
from .call import operator


@operator(flops.nothing)
def merge_forward(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts: contiguous o, and lse; see `kernels.combine.launch_merge`."""
    return kernels.combine.launch_merge(o1, lse1, o2, lse2)


@merge_forward.op.register_fake
def _(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return o1.new_empty(o1.shape), lse1.new_empty(lse1.shape)


@operator(flops.nothing, ("o", "lse"))
def merge_prefix(
    prefix: Tensor, prefix_lse: Tensor, o: Tensor, lse: Tensor, offsets: Tensor
) -> None:
    """Merge the results of a prefix into others in place; see `combine.launch_merge_prefix`."""
    kernels.combine.launch_merge_prefix(prefix, prefix_lse, o, lse, offsets)


@merge_prefix.op.register_fake
def _(*_: object) -> None: ...
