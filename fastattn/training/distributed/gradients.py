"""One norm of all gradients, however parameters are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_


def by_mesh(parameters: Iterable[nn.Parameter]) -> Mapping[Any, list[nn.Parameter]]:
    """Parameters by the mesh that they are sharded over; None = they are whole on every rank.

    One torch operation on several DTensors wants them on one mesh.
    """
    found: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        found[getattr(parameter, "device_mesh", None)].append(parameter)
    return found


def whole(x: Tensor) -> Tensor:
    """x itself, or a DTensor's value, gathered from all ranks."""
    found: Tensor = getattr(x, "full_tensor", lambda: x)()
    return found


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """As `nn.utils.clip_grad_norm_`, over the whole of every gradient; all ranks call it.

    Returns:
        The norm before clipping, the same on every rank.
    """
    wanted = [parameter for parameter in parameters if parameter.grad is not None]
    squares = [_own_square(cast(Tensor, parameter.grad)) for parameter in wanted]
    square = torch.stack(squares).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    for group in by_mesh(wanted).values():
        clip_grads_with_norm_(group, max_norm, norm, foreach=True)
    return norm


def _own_square(gradient: Any) -> Tensor:
    """This rank's share of a gradient's squared norm: ranks that hold the same share it alike."""
    from torch.distributed.tensor import DTensor

    parts = 1
    local = gradient
    if isinstance(gradient, DTensor):
        local, mesh = gradient.to_local(), gradient.device_mesh
        for dim, placement in enumerate(gradient.placements):
            parts *= 1 if placement.is_replicate() else mesh.size(dim)
    found: Tensor = local.float().square().sum() * (parts / dist.get_world_size())
    return found
