"""The ranks that share a sequence, and what they send each other: torch.distributed beneath.

A mesh of one dimension splits the sequence, or the heads. In a mesh of two the ranks of the second,
inner dimension share out the heads of the tokens that they hold together, and the first, outer
dimension splits the sequence. Ranks count through the inner dimension first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
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
# Groups of the same ranks that send from host to host; None: the group does so itself. A group that
# nobody else holds ends.
_on_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup | None] = WeakKeyDictionary()
# How many calls the ranks of a group have made alike.
_agreed: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


class Ranks(NamedTuple):
    """A rank's groups: the group that splits its sequence, and the group of the inner dimension.

    None: a dimension of one rank.
    """

    outer: ProcessGroup | None
    inner: ProcessGroup | None = None

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """Make ranks from a DeviceMesh of one or two dimensions, or from a ProcessGroup."""
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


def agree(ranks: Ranks, call: tuple[Any, ...], error: Exception | None = None) -> int:
    """Raises on every rank if one has an error, or makes another call than rank 0.

    Every call is looked at: the hosts exchange 24 bytes, a hash of the call and whether there is an
    error, before anything else is sent. No device is waited for. Only where ranks differ do they
    tell each other more.

    Args:
        call: values that must be the same on every rank, and have the same `repr` there.
        error: why this rank cannot make the call.

    Returns:
        The number of the call among those of these ranks, the same on every rank.

    Raises:
        ValueError: another rank cannot, or ranks make different calls; it names the rank.
        RuntimeError: a rank has not come within the timeout of the group.
        Exception: `error` itself, on its own rank, whatever has become of the others.
    """
    groups = [group for group in ranks.groups if group.size() > 1]
    try:
        alike, failed = _compared(repr(call), error, groups)
        said = [] if alike and not failed else _told(repr(call), error, groups)
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        raise RuntimeError(
            "a rank has not come to this call: it has ended, was stopped, makes no such call, or "
            f"has taken longer than the timeout of the process group ({lost})"
        ) from lost
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
    number = 0
    for group in groups:
        number = _agreed[group] = _agreed.get(group, 0) + 1
    return number


def _compared(
    call: str, error: Exception | None, groups: Sequence[ProcessGroup]
) -> tuple[bool, bool]:
    """Whether all ranks make the same call, and whether one has an error."""
    mark = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    # The highest mark and the lowest one.
    marks = torch.tensor([mark, -mark, int(error is not None)], device="cpu")
    for group in groups:
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=_on_host(group))
    high, low, failed = marks.tolist()
    return high == -low, bool(failed)


def _told(call: str, error: Exception | None, groups: Sequence[ProcessGroup]) -> list[Any]:
    """Collect from every rank its call and the reason why it cannot make it, by rank."""
    said: list[Any] = [(call, None if error is None else str(error))]
    for group in groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, said, _on_host(group))
        said = [x for part in parts for x in part]
    return said


def _on_host(group: ProcessGroup) -> ProcessGroup:
    """The group, or one of its ranks beside it where it sends what lies on GPUs alone.

    The first call starts that one, on all ranks of the group. It starts NCCL too, which all ranks
    do together: the first message of a ring may be one between some of them.
    """
    if group not in _on_hosts:
        config, beside = dist.get_backend_config(group), None
        if "cpu" not in config:
            own = group._get_backend(torch.device(config.partition(":")[0])).options
            beside = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=own._timeout,
                backend="gloo",
                use_local_synchronization=True,
            )
        if "nccl" in config:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        _on_hosts[group] = beside
    return _on_hosts[group] or group


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[ranks, ...]: x of every rank in a group."""
    if group is None:
        return x[None]
    gathered = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    gather_single(gathered.view(-1), x.contiguous().view(-1), group)
    return gathered


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
    received = torch.empty_like(x)
    dist.all_to_all_single(received.view(-1), x.view(-1), group=group)
    return received


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum over the first dim in fp32 or wider, in its order: the same bits every time."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def once(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the backward of an autograd.Function whose gradients have no gradient.

    As torch's `once_differentiable`, but that the error names the call.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def of_first_order(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            inputs = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
            if not torch.is_grad_enabled() or not inputs:
                return gradients
            last: Callable[..., Tensor] = _Last.apply
            return tuple(last(call, x, *inputs) if isinstance(x, Tensor) else x for x in gradients)

        return of_first_order

    return decorate


class _Last(torch.autograd.Function):
    """A gradient x that has none itself, although it is made of other inputs."""

    @staticmethod
    def forward(ctx: Any, call: str, x: Tensor, *_: Tensor) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(f"{ctx.call} is differentiable once: its gradients have no gradient")


def exchange(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`all_to_all` with its gradient, which is another one."""
    exchanged: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return exchanged


def replicated(x: Tensor, ranks: Ranks) -> Tensor:
    """x, the same on every rank, with a gradient that is summed over them, in their order."""
    copies: Tensor = _Replicated.apply(x, ranks)  # type: ignore[no-untyped-call]
    return copies


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else exchange(grad, ctx.group), None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once("a table that context_attention sums over the ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad
        for group in ctx.ranks.groups:
            total = ordered_sum(all_gather(total, group))
        return total.to(grad.dtype), None
