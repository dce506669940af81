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
    """As `nn.utils.clip_grad_norm_`, over the whole of every gradient; all ranks call it.

    Each rank scales what it holds: of a list of DTensors, torch would first look how each of them
    may be sharded, which for a model's takes seconds.

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
    """What this rank has of a gradient, and how much of its squared norm that counts for.

    Ranks that hold the same share it alike.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return gradient, 1 / dist.get_world_size()
    mesh, parts = gradient.device_mesh, 1
    for dim, placement in enumerate(gradient.placements):
        parts *= 1 if placement.is_replicate() else mesh.size(dim)
    return gradient.to_local(), parts / dist.get_world_size()
