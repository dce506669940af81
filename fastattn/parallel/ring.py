"""Ring attention: keys are sent around a ring of ranks.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, arXiv
2310.01889. Sending the next keys overlaps with compute. Only keys that a later rank may see are
sent, and only as far as needed: if needed on both sides, first in one direction and then in the
other. In the backward, gradients follow the keys, are summed in fp32 in that order, and return to
the owner.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..torch_backend import formula
from . import parts
from .hops import Needs, needs, total
from .parts import Gradients, Whole
from .pieces import Options, Run, blank
from .plan import ContextPlan
from .ranks import rank_in, size_of


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: ContextPlan, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """o in q's dtype, and lse. Arguments as in `gather_forward`."""
    rank = rank_in(group)
    needed = needs(plan.assignment, options)
    runs = plan.runs(rank)
    options = dict(options)
    sinks = options.pop("sinks", None)
    o, lse = blank(q, v, parts.wide_dtype(q))
    for step, source, held in _around((k, v), needed, group):
        if needed.seen[rank][source]:
            keys, values = held
            parts.part_forward(o, lse, q, keys, values, runs, needed.runs(source, step), options)
            del keys, values
        del held  # it has been sent
    o, lse = formula.with_column(o, lse, sinks)
    return o.to(q.dtype), lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, leaves: list[Tensor], whole: Whole,
    plan: ContextPlan, group: ProcessGroup,
) -> Gradients:  # fmt: skip
    """All gradients, with padding in k's and v's."""
    rank = rank_in(group)
    needed = needs(plan.assignment, options)
    after, before = needed.hops
    runs = plan.runs(rank)
    dq, *learned = parts.zeros_for(q, *leaves)
    dk, dv = parts.zeros_for(k, v)
    home: list[tuple[int, _Passing]] = []
    behind: _Passing | None = None
    for step, source, held in _around((k, v), needed, group):
        there = needed.runs(source, step)
        # Gradients of this rank's own keys stay here.
        real = plan.real(rank)
        own = [dk[:, :, :real], dv[:, :, :real]] if step == 0 else parts.zeros_for(*held)
        if needed.seen[rank][source]:
            part = Gradients(dq, own[0], own[1], learned)
            keys, values = held
            parts.part_backward(part, q, keys, values, runs, there, options, leaves, whole)
            del part, keys, values
        del held  # it has been sent
        if step == 0:
            continue
        toward = 1 if step > 0 else -1
        if behind is not None:
            earlier = behind.wait()
            for x, more in zip(earlier, own, strict=True):
                _add(x, needed.runs(source, toward), more, there)
            own, behind = [*earlier], None
        ends = step in (after, -before)
        by = -step if ends else toward
        # Received: own gradients from the last rank, or the next rank's on their way.
        coming = needed.runs(rank if ends else (source - toward) % size_of(group), toward)
        passing = _pass_on(own, group, by, total(coming))
        behind = None if ends else passing
        if ends:
            home.append((toward, passing))
    for toward, passing in home:
        for x, more in zip((dk, dv), passing.wait(), strict=True):
            _add(x, runs, more, needed.runs(rank, toward))
    return Gradients(dq, dk, dv, learned)


def _around(
    own: Sequence[Tensor], needed: Needs, group: ProcessGroup
) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
    """Yield (step, rank, keys of that rank), while the next keys are received."""
    rank, size = rank_in(group), size_of(group)
    own = [_taken(x, needed.runs(rank, 0), needed.runs(rank, 0)) for x in own]
    held, before = own, 0
    steps = needed.hops.steps
    for step, following in zip(steps, [*steps[1:], 0], strict=True):
        coming = None
        if following:
            start = own if following == -1 else held
            before = 0 if following == -1 else step
            toward = 1 if following > 0 else -1
            source = (rank - before) % size
            kept, sent = needed.runs(source, before), needed.runs(source, following)
            length = total(needed.runs((rank - following) % size, following))
            coming = _pass_on([_taken(x, kept, sent) for x in start], group, toward, length)
        yield step, (rank - step) % size, held
        if coming is not None:
            held = [*coming.wait()]


def _places(held: Sequence[Run], some: Sequence[Run]) -> Iterator[slice]:
    """Slices of runs within the concatenated runs that contain them."""
    for start, stop in some:
        row = 0
        for first, last in held:
            if first <= start and stop <= last:
                yield slice(row + start - first, row + stop - first)
            row += last - first


def _taken(x: Tensor, held: Sequence[Run], some: Sequence[Run]) -> Tensor:
    """The tokens of some runs from x [B, H, T, D], which holds other runs and padding too."""
    if x.shape[2] == total(some):
        return x.contiguous()
    return torch.cat([x[:, :, at] for at in _places(held, some)] or [x[:, :, :0]], 2).contiguous()


def _add(x: Tensor, held: Sequence[Run], more: Tensor, some: Sequence[Run]) -> None:
    """Add values of some runs to x, which holds more runs, in place."""
    row = 0
    for at in _places(held, some):
        x[:, :, at] += more[:, :, row : row + at.stop - at.start]
        row += at.stop - at.start


class _Passing(NamedTuple):
    """A transfer in progress: sent tensors, kept alive, and received ones."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(tensors: Sequence[Tensor], group: ProcessGroup, by: int, length: int) -> _Passing:
    """Send tensors `by` ranks ahead, and receive from the other side.

    length: received tokens. Nothing is sent if empty.
    """
    rank, size = rank_in(group), size_of(group)
    if by % size == 0:
        return _Passing(tensors, tensors, ())
    received = [x.new_empty(*x.shape[:2], length, x.shape[3]) for x in tensors]
    there, whence = (rank + by) % size, (rank - by) % size
    moves = [dist.P2POp(dist.isend, x, group=group, group_peer=there) for x in tensors]
    moves += [dist.P2POp(dist.irecv, x, group=group, group_peer=whence) for x in received]
    moves = [move for move in moves if move.tensor.numel()]
    return _Passing(tensors, received, dist.batch_isend_irecv(moves) if moves else ())
