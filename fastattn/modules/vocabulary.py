"""Logits of a vocabulary that is sharded over ranks, and their cross-entropy.

As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3), no rank holds the logits of
the whole vocabulary; ranks exchange three sums per token. torch's own `loss_parallel` has no label
smoothing, and needs the backward pass inside its context.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..parallel.ranks import once
from .sharded import local_part

# Target that is ignored, as by F.cross_entropy.
_IGNORED = -100


def enter(x: Tensor, mesh: Any) -> Tensor:
    """x, replicated over a mesh; its gradient is the sum over the ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]
    )


def leave(x: Tensor, mesh: Any) -> Tensor:
    """The sum of the ranks' x on every rank; each rank gets the whole gradient."""
    whole = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()


def first_row(count: int, mesh: Any) -> int:
    """Index of this rank's first row of `count` rows sharded over a mesh."""
    return min(mesh.get_local_rank() * -(-count // mesh.size()), count)  # as torch.chunk has it


def sharded_linear(x: Tensor, weight: DTensor, bias: DTensor | None = None) -> DTensor:
    """F.linear of replicated x [..., C] and weight [V, C] sharded by rows: [..., V]."""
    mesh = weight.device_mesh
    y = F.linear(enter(x, mesh), local_part(weight), None if bias is None else local_part(bias))
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride
    )


def sharded_cross_entropy(
    logits: DTensor, targets: Tensor, smoothing: float = 0.0, *, count: int | None = None
) -> Tensor:
    """`F.cross_entropy` of logits [N, V], sharded by V, over the targets [N] that are not -100.

    Args:
        logits: from `sharded_linear`, of any floating dtype; the sums are fp32 or wider.
        targets: int64, the same on every rank.
        smoothing: as F.cross_entropy's label_smoothing.
        count: divisor of the sum; default: the number of targets that are not -100.
    """
    mesh = logits.device_mesh
    local = logits.to_local()
    tokens = logits.shape[-1]
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, targets - first_row(tokens, mesh), tokens, smoothing, mesh.get_group()
    )
    seen = targets != _IGNORED
    # As F.cross_entropy does on a device.
    known = ~seen | (targets >= 0) & (targets < tokens)
    torch._assert_async(known.all(), f"targets must be in [0, {tokens}) or -100")
    total = torch.where(seen, losses, 0.0).sum()
    return (total / (seen.sum() if count is None else count)).to(local.dtype)


class _CrossEntropy(torch.autograd.Function):
    """-(1 - e) log p_t - e mean_j log p_j for each row; targets count from this rank's first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, count: int, smoothing: float, group: Any
    ) -> Tensor:
        logits, x = x, x.to(torch.promote_types(x.dtype, torch.float32))
        rows, width = x.shape
        highest = x.amax(-1) if width else x.new_full((rows,), float("-inf"))
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        x = x - highest[:, None]
        here = (targets >= 0) & (targets < width)
        at = torch.where(here, targets, 0)
        chosen = x.gather(1, at[:, None])[:, 0] if width else x.new_zeros(rows)
        sums = torch.stack((x.exp().sum(-1), torch.where(here, chosen, 0.0), x.sum(-1)))
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, highest + log_sum, at, here)
        ctx.count, ctx.smoothing = count, smoothing
        return log_sum - (1 - smoothing) * sums[1] - smoothing / count * sums[2]

    @staticmethod
    @once("cross-entropy of a sharded vocabulary")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits, lse, at, here = saved
        dx = (logits - lse[:, None]).exp() - ctx.smoothing / ctx.count
        if dx.shape[1]:
            share = torch.where(here, 1 - ctx.smoothing, 0.0).to(dx.dtype)
            dx.scatter_add_(1, at[:, None], -share[:, None])
        return dx * grad[:, None], None, None, None, None
