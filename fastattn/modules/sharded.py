"""Parameters that are sharded over ranks, as this rank's part of a model reads them."""

from typing import TypeVar

import torch
from torch import Tensor

from ..functional.sharded import is_dtensor

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)


def local_part(x: _Maybe, *, summed: bool = True) -> _Maybe:
    """This rank's part of a DTensor, or what is none as it is; differentiable.

    Args:
        x: a parameter.
        summed: of what every rank has whole, gradients are summed over the ranks, since each has
            the share of its heads. False: all ranks compute the same of it.
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
    # Its gradient goes back to the parameter's own placements.
    return x.redistribute(placements=x.placements).to_local(grad_placements=parts)
