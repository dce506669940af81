"""Keys go around a ring of ranks, and every rank's queries meet them as they pass.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv
2310.01889. The next keys are on their way while those at hand are computed. Keys go no farther than
some rank may see them: where they are needed on both sides, first one way round and then the other.
Backward the gradients of the keys travel behind them, are added up in fp32 in that order, and go
home from where the keys have ended.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .hops import Hops, hops, seen
from .parts import (
    Gradients,
    Whole,
    add_sinks,
    part_backward,
    part_forward,
    wide_dtype,
    zeros_for,
)
from .pieces import Options, blank
from .plan import ContextPlan
from .ranks import ordered_sum, rank_in, size_of


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: ContextPlan, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """o in q's dtype, and lse. Arguments as of `gather_forward`."""
    rank = rank_in(group)
    found = seen(plan, options)
    runs = plan.runs(rank)
    options = dict(options)
    sinks = options.pop("sinks", None)
    o, lse = blank(q, v, wide_dtype(q))
    for _, source, held in _around((k.contiguous(), v.contiguous()), hops(found), group):
        if found[rank][source]:
            keys, values = (x[:, :, : plan.real(source)] for x in held)
            part_forward(o, lse, q, keys, values, runs, plan.runs(source), options)
            del keys, values  # they hold what has been sent on
    o, lse = add_sinks(o, lse, sinks)
    return o.to(q.dtype), lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, leaves: list[Tensor], whole: Whole,
    plan: ContextPlan, group: ProcessGroup,
) -> Gradients:  # fmt: skip
    """All gradients, k's and v's with their padding."""
    rank = rank_in(group)
    found = seen(plan, options)
    way = hops(found)
    runs = plan.runs(rank)
    dq, *learned = zeros_for(q, *leaves)
    home: list[_Passing] = []
    behind: _Passing | None = None
    for step, source, held in _around((k.contiguous(), v.contiguous()), way, group):
        dk, dv = zeros_for(*held)
        if found[rank][source]:
            keys, values, dkeys, dvalues = (x[:, :, : plan.real(source)] for x in (*held, dk, dv))
            total = Gradients(dq, dkeys, dvalues, learned)
            there = plan.runs(source)
            part_backward(total, q, keys, values, runs, there, options, leaves, whole)
            del keys, values, dkeys, dvalues, total  # they hold what has been sent on
        if behind is not None:
            dk, dv = (ordered_sum(both) for both in zip(behind.wait(), (dk, dv), strict=True))
        if step == way.after or step == -way.before < 0:
            home.append(_pass_on((dk, dv), group, -step))
            behind = None
        else:
            behind = _pass_on((dk, dv), group, 1 if step >= 0 else -1)
    dk, dv = (ordered_sum(parts) for parts in zip(*(part.wait() for part in home), strict=True))
    return Gradients(dq, dk, dv, learned)


def _around(
    own: Sequence[Tensor], way: Hops, group: ProcessGroup
) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
    """(step, rank, tensors of that rank) for each step of the way, the next ones being sent for."""
    held = own
    steps = way.steps
    for step, following in zip(steps, [*steps[1:], 0], strict=True):
        coming = None
        if following:
            start = own if following == -1 else held
            coming = _pass_on(start, group, 1 if following > 0 else -1)
        yield step, (rank_in(group) - step) % size_of(group), held
        if coming is not None:
            held = coming.wait()


class _Passing(NamedTuple):
    """Tensors on their way: what is sent, which has to live so long, and what is received."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(tensors: Sequence[Tensor], group: ProcessGroup, by: int) -> _Passing:
    """Sends tensors to the rank that many further on, and receives as many from the other side."""
    rank, size = rank_in(group), size_of(group)
    if by % size == 0:
        return _Passing(tensors, tensors, ())
    received = [torch.empty_like(x) for x in tensors]
    there, whence = (rank + by) % size, (rank - by) % size
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=there) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=whence) for x in received]
    return _Passing(tensors, received, dist.batch_isend_irecv([*sends, *receives]))
