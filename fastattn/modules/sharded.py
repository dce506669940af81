"""Parameters read outside their layer's call: parts over ranks, weights, device and dtype."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def plain_weight(linear: nn.Module) -> Tensor | None:
    """The weight of an `nn.Linear` whose call is a product with it and nothing else.

    None for what adapters, hooks, parametrizations and quantisation make of one: call it instead.
    """
    if type(linear) is not nn.Linear or "forward" in linear.__dict__:
        return None
    if linear._forward_hooks or linear._forward_pre_hooks:
        return None
    weight = linear.weight
    return None if is_traceable_wrapper_subclass(weight) and not is_dtensor(weight) else weight


def factory_options(
    device: torch.device | str | None, dtype: torch.dtype | None, *modules: nn.Module
) -> dict[str, Any]:
    """Options device and dtype of new tensors: as given, else of the first floats in modules.

    The dtype is autocast's under autocast. Quantised layers may have no parameter of floats.
    """

    def each() -> Iterator[Tensor]:
        return chain.from_iterable(module.parameters() for module in modules)

    like = next(filter(torch.is_floating_point, each()), None)
    like = next(each(), torch.empty(0)) if like is None else like
    device = like.device if device is None else torch.device(device)
    if dtype is None:
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        # The query raises on devices without autocast, such as meta.
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
    return {"device": device, "dtype": dtype}
