"""Ranks that share a sequence, and their communication by torch.distributed.

A mesh of one dim shards the sequence, or the heads. In a mesh of two dims the inner one shards the
heads of its ranks' tokens, and the outer one the sequence. Ranks are numbered along the inner dim
first.
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
from ..ops import spread
from .plan import ContextPlan

Mesh: TypeAlias = DeviceMesh | ProcessGroup
# Renamed in torch 2.13.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Host-side groups of the same ranks; None: the group itself sends from the host. Weak keys.
_on_hosts: WeakKeyDictionary[ProcessGroup, ProcessGroup | None] = WeakKeyDictionary()
# Number of agreed calls of a group's ranks.
_agreed: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


class Ranks(NamedTuple):
    """A rank's groups: of the outer dim (sequence) and of the inner dim (heads).

    None: a dim of one rank.
    """

    outer: ProcessGroup | None
    inner: ProcessGroup | None = None

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """Ranks of a DeviceMesh of one or two dims, or of a ProcessGroup."""
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
        """The groups, inner first: adjacent ranks."""
        return tuple(group for group in (self.inner, self.outer) if group is not None)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return size_of(self.outer) * size_of(self.inner)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return rank_in(self.outer) * size_of(self.inner) + rank_in(self.inner)

    @property
    def degree(self) -> int:
        """Number of ranks that share the heads."""
        return size_of(self.inner)


def size_of(group: ProcessGroup | None) -> int:
    """Ranks in a group."""
    return 1 if group is None else group.size()


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in a group."""
    return 0 if group is None else group.rank()


def check_mesh(plan: Any, ranks: Ranks) -> None:
    """Check that plan is a ContextPlan for this number of ranks."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {checks.type_name(plan)}")
    if plan.ranks != ranks.size:
        raise ValueError(f"mesh must have the plan's {plan.ranks} ranks, got {ranks.size}")


def agree(ranks: Ranks, call: tuple[Any, ...], error: Exception | None = None) -> int:
    """Raise on every rank if one has an error, or a call that differs from rank 0's.

    For every call the hosts exchange 24 bytes, a hash of the call and an error flag, before other
    communication, without waiting for a device. They exchange details only if ranks differ.

    Args:
        call: values that must have equal `repr` on every rank.
        error: why this rank cannot make the call.

    Returns:
        The number of the call among these ranks' calls, equal on every rank.

    Raises:
        ValueError: another rank has an error, or calls differ; the message names the rank.
        RuntimeError: a rank did not make the call within the group's timeout.
        Exception: `error` itself, on its own rank.
    """
    groups = [group for group in ranks.groups if group.size() > 1]
    try:
        alike, failed = _compared(repr(call), error, groups)
        replies = [] if alike and not failed else _gathered_calls(repr(call), error, groups)
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        raise RuntimeError(
            "a rank did not make this call: it has ended, was stopped, skips the call, or took "
            f"longer than the timeout of the process group ({lost})"
        ) from lost
    if error is not None:
        raise error
    for rank, (_, reason) in enumerate(replies):
        if reason is not None:
            raise ValueError(f"rank {rank} refused the call: {reason}")
    for rank, (theirs, _) in enumerate(replies):
        if theirs != replies[0][0]:
            raise ValueError(
                "plan, shapes and options must be the same on every rank: rank 0 has "
                f"{replies[0][0]}, rank {rank} has {theirs}"
            )
    number = 0
    for group in groups:
        number = _agreed[group] = _agreed.get(group, 0) + 1
    return number


def _compared(
    call: str, error: Exception | None, groups: Sequence[ProcessGroup]
) -> tuple[bool, bool]:
    """Whether all ranks make the same call, and whether any has an error."""
    mark = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    # The highest mark and the lowest one.
    marks = torch.tensor([mark, -mark, int(error is not None)], device="cpu")
    for group in groups:
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=_on_host(group))
    high, low, failed = marks.tolist()
    return high == -low, bool(failed)


def _gathered_calls(
    call: str, error: Exception | None, groups: Sequence[ProcessGroup]
) -> list[Any]:
    """Gather every rank's call and error message, by rank."""
    replies: list[Any] = [(call, None if error is None else str(error))]
    for group in groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, replies, _on_host(group))
        replies = [x for part in parts for x in part]
    return replies


def _on_host(group: ProcessGroup) -> ProcessGroup:
    """The group, or a gloo group of its ranks if it only sends GPU tensors.

    The first call creates it, on all ranks. It also initialises NCCL collectively, as a ring's
    first message may be between only some ranks.
    """
    if group not in _on_hosts:
        config, gloo = dist.get_backend_config(group), None
        if "cpu" not in config:
            own = group._get_backend(torch.device(config.partition(":")[0])).options
            gloo = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=own._timeout,
                backend="gloo",
                use_local_synchronization=True,
            )
        if "nccl" in config:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        _on_hosts[group] = gloo
    return _on_hosts[group] or group


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather x of every rank in a group: [ranks, ...]."""
    if group is None:
        return x[None]
    gathered = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    gather_single(gathered.view(-1), x.contiguous().view(-1), group)
    return gathered


def gather_sequence(x: Tensor, dim: int, plan: ContextPlan, ranks: Ranks) -> Tensor:
    """Gather the whole sequence, T long in dim, from each rank's tokens; no gradient."""
    parts = x.movedim(dim, 0)
    for group in ranks.groups:
        parts = all_gather(parts, group).flatten(0, 1)
    return parts.index_select(0, plan.order.to(x.device)).movedim(0, dim)


def count_targets(targets: Tensor, ranks: Ranks) -> Tensor:
    """Count the targets of all ranks that are not -100: an int64 scalar."""
    count = (targets != -100).sum()
    for group in ranks.groups:
        dist.all_reduce(count, group=group)
    return count


def first_rank(x: Tensor, ranks: Ranks) -> Tensor:
    """x of the first rank."""
    for group in ranks.groups:
        x = all_gather(x, group)[0]
    return x


def all_to_all(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Exchange the first dim of x [ranks, ...]: result r comes from rank r."""
    if group is None:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received.view(-1), x.view(-1), group=group)
    return received


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum over the first dim in fp32 or wider, in order, so deterministic."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def once(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `backward(ctx, saved, *grads)` an autograd function's, with one order of gradients.

    Unlike torch's `once_differentiable` it also refuses a second order by the saved tensors. They
    are read once: a checkpoint unpacks them once.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def of_first_order(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            with torch.no_grad(), spread.attending(None):
                gradients = backward(ctx, saved, *grads)
            inputs = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
            if not torch.is_grad_enabled() or not inputs:
                return gradients
            last: Callable[..., Tensor] = _Last.apply
            return tuple(last(call, x, *inputs) if isinstance(x, Tensor) else x for x in gradients)

        return of_first_order

    return decorate


class _Last(torch.autograd.Function):
    """A gradient x without a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, call: str, x: Tensor, *_: Tensor) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(f"{ctx.call} is differentiable once: its gradients have no gradient")


def exchange(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Differentiable `all_to_all`."""
    exchanged: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return exchanged


def replicated(x: Tensor, ranks: Ranks) -> Tensor:
    """x, equal on every rank, in fp32 or wider, with a gradient summed over the ranks, in order."""
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
        ctx.call = ranks, x.dtype
        return x.to(torch.promote_types(x.dtype, torch.float32)).view_as(x)

    @staticmethod
    @once("a table that context_attention sums over the ranks")
    def backward(ctx: Any, saved: object, grad: Tensor) -> tuple[Tensor, None]:
        ranks, dtype = ctx.call
        for group in ranks.groups:
            grad = ordered_sum(all_gather(grad, group))
        return grad.to(dtype), None
