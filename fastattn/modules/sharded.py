"""Local parts of parameters that are sharded over ranks."""

from typing import TypeVar

import torch
from torch import Tensor

from ..functional.sharded import is_dtensor

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)


def local_part(x: _Maybe, *, summed: bool = True) -> _Maybe:
    """This rank's part of a DTensor; any other value unchanged. Differentiable.

    Args:
        x: a parameter.
        summed: sum the gradients of replicated parameters over the ranks, since each computes the
            share of its heads. False: all ranks compute the same gradient.
    """
    if not is_dtensor(x):
        return x
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(x, DTensor)
    if not torch.is_grad_enabled():
        return x.to_local()
    whole = [placement.is_replicate() for placement in x.placements]
    if not (summed and any(whole)):
        return x.to_local()
    parts = [
        Partial() if one else placement for one, placement in zip(whole, x.placements, strict=True)
    ]
    # The gradient returns to the parameter's placements.
    return x.redistribute(placements=x.placements).to_local(grad_placements=parts)
