"""The ranks that share a sequence, and what they send each other: torch.distributed beneath.

A mesh of one dimension splits the sequence, or the heads. In a mesh of two the ranks of the second,
inner dimension share out the heads of the tokens that they hold together, and the first, outer
dimension splits the sequence. Ranks count through the inner dimension first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import checks
from .plan import ContextPlan

Mesh: TypeAlias = DeviceMesh | ProcessGroup
# torch 2.13 has it under a new name.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Calls that all ranks of a group were seen to make alike. A group that nobody else holds ends.
_agreed: WeakKeyDictionary[ProcessGroup, set[Any]] = WeakKeyDictionary()


class Ranks(NamedTuple):
    """A rank's place: the group that its sequence is split over, and that of the inner dimension.

    None: a dimension of one rank.
    """

    outer: ProcessGroup | None
    inner: ProcessGroup | None = None

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """Of a DeviceMesh of one or two dimensions, or a ProcessGroup."""
        if isinstance(mesh, ProcessGroup):
            return Ranks(mesh)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a DeviceMesh or ProcessGroup, got {checks.type_name(mesh)}"
            )
        if mesh.ndim == 1:
            return Ranks(mesh.get_group())
        if mesh.ndim == 2:
            return Ranks(mesh.get_group(0), mesh.get_group(1))
        raise ValueError(
            f"mesh must have one dimension, or two (ring, heads), got {mesh.ndim}: take a slice "
            "of it by the names of its dimensions"
        )

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The inner group first: ranks that are next to each other."""
        return tuple(group for group in (self.inner, self.outer) if group is not None)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return size_of(self.outer) * size_of(self.inner)

    @property
    def rank(self) -> int:
        """This one's number."""
        return rank_in(self.outer) * size_of(self.inner) + rank_in(self.inner)

    @property
    def degree(self) -> int:
        """How many ranks share out the heads."""
        return size_of(self.inner)


def size_of(group: ProcessGroup | None) -> int:
    """Ranks in a group."""
    return 1 if group is None else group.size()


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in a group."""
    return 0 if group is None else group.rank()


def check_mesh(plan: Any, ranks: Ranks) -> None:
    """A plan, for as many ranks as there are."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {checks.type_name(plan)}")
    if plan.ranks != ranks.size:
        raise ValueError(f"mesh must have the plan's {plan.ranks} ranks, got {ranks.size}")


def agree(ranks: Ranks, call: tuple[Any, ...], error: Exception | None = None) -> None:
    """Raises on every rank if one has an error, or makes another call than rank 0.

    Ranks look at each other the first time that this rank makes the call; after that a call costs
    nothing here.

    Args:
        call: what has to be the same on every rank, `repr` of which is the same in every process.
        error: why this rank cannot make the call.
    """
    known = [_agreed.setdefault(group, set()) for group in ranks.groups]
    if error is None and all(call in calls for calls in known):
        return
    said: list[Any] = [(repr(call), None if error is None else str(error))]
    for group in ranks.groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, said, group)
        said = [x for part in parts for x in part]
    if error is not None:
        raise error
    for rank, (_, reason) in enumerate(said):
        if reason is not None:
            raise ValueError(f"rank {rank} refused the call: {reason}")
    for rank, (theirs, _) in enumerate(said):
        if theirs != said[0][0]:
            raise ValueError(
                "plan, shapes and options must be the same on every rank: rank 0 has "
                f"{said[0][0]}, rank {rank} has {theirs}"
            )
    for calls in known:
        calls.add(call)


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[ranks, ...]: x of every rank in a group."""
    if group is None:
        return x[None]
    found = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    gather_single(found.view(-1), x.contiguous().view(-1), group)
    return found


def gather_sequence(x: Tensor, dim: int, plan: ContextPlan, ranks: Ranks) -> Tensor:
    """The whole sequence, T long in dim, from each rank's tokens; without gradient."""
    parts = x.movedim(dim, 0)
    for group in ranks.groups:
        parts = all_gather(parts, group).flatten(0, 1)
    return parts.index_select(0, plan.order.to(x.device)).movedim(0, dim)


def first_rank(x: Tensor, ranks: Ranks) -> Tensor:
    """x of the first rank."""
    for group in ranks.groups:
        x = all_gather(x, group)[0]
    return x


def all_to_all(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x [ranks, ...] with its first dim sent out: entry r comes from rank r."""
    if group is None:
        return x
    x = x.contiguous()
    found = torch.empty_like(x)
    dist.all_to_all_single(found.view(-1), x.view(-1), group=group)
    return found


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum over the first dim in fp32 or wider, in its order: the same bits every time."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def exchange(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`all_to_all` with its gradient, which is another one."""
    found: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def replicated(x: Tensor, ranks: Ranks) -> Tensor:
    """x, the same on every rank, with a gradient that is summed over them, in their order."""
    found: Tensor = _Replicated.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad
        for group in ctx.ranks.groups:
            total = ordered_sum(all_gather(total, group))
        return total.to(grad.dtype), None
