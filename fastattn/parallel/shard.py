"""Shard tensors of a whole sequence by a plan, and gather them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .plan import ContextPlan
from .ranks import Mesh, Ranks, check_mesh, gather_sequence


def shard(x: Tensor, dim: int, plan: ContextPlan, mesh: Mesh) -> Tensor:
    """This rank's tokens of x, which is equal on every rank; differentiable.

    The gradient of x is gathered, equal on every rank.

    Args:
        x: T long in dim.
        dim: dim of the tokens.
        plan: which rank holds which.
        mesh: the ranks.

    Returns:
        plan.length long in dim. Padding is 0.

    Raises:
        ValueError: x does not have the plan's length, or the mesh has another number of ranks.
    """
    ranks = Ranks.of(mesh)
    check_mesh(plan, ranks)
    _check_length(x, dim, plan.T, "the plan's sequence")
    part: Tensor = _Shard.apply(x, dim, plan, ranks)  # type: ignore[no-untyped-call]
    return part


def unshard(x: Tensor, dim: int, plan: ContextPlan, mesh: Mesh) -> Tensor:
    """Gather the whole sequence from each rank's tokens, without padding; differentiable.

    The inverse of `shard`, with its arguments and errors. All ranks must compute the same from the
    result: a rank's gradient is its slice, as for a gathered DTensor.
    """
    ranks = Ranks.of(mesh)
    check_mesh(plan, ranks)
    _check_length(x, dim, plan.length, "a rank's part")
    whole: Tensor = _Unshard.apply(x, dim, plan, ranks)  # type: ignore[no-untyped-call]
    return whole


def roll(
    x: Tensor, dim: int, plan: ContextPlan, mesh: Mesh, *, shift: int = -1, fill: float = -100
) -> Tensor:
    """Shift a sharded sequence by `shift` tokens: with -1, each token gets the next token's value.

    Targets of a language model are `roll(tokens, 1, plan, mesh)`, with `fill`, which
    `cross_entropy` ignores, at the end and in padding. No gradient.

    Args:
        x: this rank's tokens, plan.length long in dim.
        dim, plan, mesh: as for `shard`.
        shift: as for `torch.roll`, except that nothing wraps around the end.
        fill: value beyond the ends.
    """
    ranks = Ranks.of(mesh)
    check_mesh(plan, ranks)
    _check_length(x, dim, plan.length, "a rank's part")
    whole = gather_sequence(x.detach(), dim, plan, ranks).movedim(dim, 0)
    wanted = plan.indices(ranks.rank).to(x.device)
    source = wanted - checks.check_int("shift", shift)
    inside = (wanted < plan.T) & (source >= 0) & (source < plan.T)
    rolled = whole[source.clamp(0, plan.T - 1)]
    rolled[~inside] = fill
    return rolled.movedim(0, dim).contiguous()


def own_tokens(x: Tensor, dim: int, plan: ContextPlan, rank: int) -> Tensor:
    """A rank's tokens of the whole x, 0 in padding."""
    index = plan.indices(rank)
    real = plan.real(rank)
    own = x.index_select(dim, index[:real].to(x.device))
    return padded(own, dim, plan.length)


def padded(x: Tensor, dim: int, length: int, value: float = 0.0) -> Tensor:
    """x padded at the end of dim to a length."""
    sides = (0, 0) * ((-1 - dim) % x.dim()) + (0, length - x.shape[dim])
    return F.pad(x, sides, value=value) if sides[-1] else x


def _check_length(x: Tensor, dim: int, length: int, of: str) -> None:
    checks.check_tensor("x", x)
    if x.shape[dim] != length:
        raise ValueError(
            f"x must have {length} tokens in dim {dim}, as {of} has, got {list(x.shape)}"
        )


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, plan: ContextPlan, ranks: Ranks) -> Tensor:
        ctx.call = (dim, plan, ranks)
        return own_tokens(x, dim, plan, ranks.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Unshard.apply(grad, *ctx.call), None, None, None  # type: ignore[no-untyped-call]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, plan: ContextPlan, ranks: Ranks) -> Tensor:
        ctx.call = (dim, plan, ranks)
        return gather_sequence(x, dim, plan, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Shard.apply(grad, *ctx.call), None, None, None  # type: ignore[no-untyped-call]
