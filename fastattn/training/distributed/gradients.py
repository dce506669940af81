"""One norm of all gradients, however parameters are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
    """Clip gradients like `nn.utils.clip_grad_norm_`, by the global norm; all ranks call it.

    Each rank scales its own shards: given DTensors, torch would first examine how each may be
    sharded, which takes seconds for a model.

    Returns:
        The norm before clipping, the same on every rank.
    """
    held = [_held(x.grad) for x in parameters if x.grad is not None]
    square = torch.stack([x.float().square().sum() * share for x, share in held]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([x for x, _ in held], scale)
    return norm


def _held(gradient: Any) -> tuple[Tensor, float]:
    """This rank's shard of a gradient, and the weight of its squared norm in the global sum.

    Ranks with the same shard share the weight equally.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return gradient, 1 / dist.get_world_size()
    mesh, parts = gradient.device_mesh, 1
    for dim, placement in enumerate(gradient.placements):
        parts *= 1 if placement.is_replicate() else mesh.size(dim)
    return gradient.to_local(), parts / dist.get_world_size()
