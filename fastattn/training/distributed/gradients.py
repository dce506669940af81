"""One norm of all gradients, however parameters are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


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
    """As `nn.utils.clip_grad_norm_`, over the whole of every gradient.

    Returns:
        The norm before clipping, the same on every rank.
    """
    groups = [[x for x in group if x.grad is not None] for group in by_mesh(parameters).values()]
    groups = [group for group in groups if group]
    norms = [
        whole(get_total_norm([x.grad for x in group if x.grad is not None], foreach=True))
        for group in groups
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm, foreach=True)
    return norm
