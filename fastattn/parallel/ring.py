"""Keys go around a ring of ranks, and every rank's queries meet them as they pass.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv
2310.01889. The next keys are on their way while those at hand are computed. Backward the gradients
of the keys travel behind them, from the rank that holds the keys on, and are added up in fp32 in
that order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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
    rank, size = rank_in(group), size_of(group)
    runs = plan.runs(rank)
    options = dict(options)
    sinks = options.pop("sinks", None)
    o, lse = blank(q, v, wide_dtype(q))
    held: Sequence[Tensor] = (k.contiguous(), v.contiguous())
    for step in range(size):
        coming = _pass_on(held, group) if step + 1 < size else None
        source = (rank - step) % size
        keys, values = (x[:, :, : plan.real(source)] for x in held)
        part_forward(o, lse, q, keys, values, runs, plan.runs(source), options)
        if coming is not None:
            held = coming.wait()
    o, lse = add_sinks(o, lse, sinks)
    return o.to(q.dtype), lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, leaves: list[Tensor], whole: Whole,
    plan: ContextPlan, group: ProcessGroup,
) -> Gradients:  # fmt: skip
    """All gradients, k's and v's with their padding."""
    rank, size = rank_in(group), size_of(group)
    runs = plan.runs(rank)
    dq, *learned = zeros_for(q, *leaves)
    held: Sequence[Tensor] = (k.contiguous(), v.contiguous())
    behind: _Passing | None = None
    for step in range(size):
        coming = _pass_on(held, group) if step + 1 < size else None
        source = (rank - step) % size
        real = slice(plan.real(source))
        keys, values = (x[:, :, real] for x in held)
        dk, dv = zeros_for(*held)
        part_backward(
            Gradients(dq, dk[:, :, real], dv[:, :, real], learned),
            q,
            keys,
            values,
            runs,
            plan.runs(source),
            options,
            leaves,
            whole,
        )
        if behind is not None:
            dk, dv = (ordered_sum(both) for both in zip(behind.wait(), (dk, dv), strict=True))
        behind = _pass_on((dk, dv), group)
        if coming is not None:
            held = coming.wait()
    assert behind is not None
    dk, dv = behind.wait()
    return Gradients(dq, dk, dv, learned)


class _Passing(NamedTuple):
    """Tensors on their way: what is sent, which has to live so long, and what is received."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(tensors: Sequence[Tensor], group: ProcessGroup) -> _Passing:
    """Sends tensors to the next rank, and receives as many from the one before."""
    rank, size = rank_in(group), size_of(group)
    if size == 1:
        return _Passing(tensors, tensors, ())
    received = [torch.empty_like(x) for x in tensors]
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in received]
    return _Passing(tensors, received, dist.batch_isend_irecv([*sends, *receives]))
