"""The gather method: each rank gathers all keys, a few heads at a time, for its queries.

The backward gathers the keys again. Gradients are sent to the keys' owners, which sum them in the
order of ranks.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .parts import Gradients, Whole, part_backward, whole_forward, zeros_for
from .pieces import Options, of_heads
from .plan import ContextPlan
from .ranks import all_to_all, gather_single, ordered_sum, rank_in, size_of


def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: ContextPlan, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """o in q's dtype, and lse, of this rank's queries q [B, H_q, T_r, D] without padding.

    k, v: [B, H_k, plan.length, D or D_v], its keys. options: for `pieces`.
    """
    runs = plan.runs(rank_in(group))
    results = [
        whole_forward(q[:, heads], keys, values, runs, sliced)
        for heads, keys, values, sliced in _by_heads(q, k, v, options, plan, group)
    ]
    o, lse = zip(*results, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 1)


def gather_backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, leaves: list[Tensor], whole: Whole,
    plan: ContextPlan, group: ProcessGroup,
) -> Gradients:  # fmt: skip
    """All gradients, with padding in k's and v's. Arguments as in `gather_forward`."""
    runs, everything = plan.runs(rank_in(group)), [(0, plan.T)]
    results = []
    for heads, keys, values, sliced in _by_heads(q, k, v, options, plan, group):
        dq, dk, dv, *learned = zeros_for(q[:, heads], keys, values, *leaves)
        total = Gradients(dq, dk, dv, learned)
        part_backward(
            total, q[:, heads], keys, values, runs, everything, sliced, leaves, whole.heads(heads)
        )
        # This rank's tokens of the sum of every rank's gradient.
        both = torch.cat((dk, dv), -1).permute(2, 0, 1, 3)
        rows = both.new_zeros(plan.ranks * plan.length, *both.shape[1:])
        rows[plan.order.to(both.device)] = both
        parts = all_to_all(rows.view(plan.ranks, plan.length, *rows.shape[1:]), group)
        both = ordered_sum(parts).permute(1, 2, 0, 3)
        dk, dv = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
        results.append((dq, dk, dv, learned))
    dqs, dks, dvs, shares = zip(*results, strict=True)
    sums = [ordered_sum(grads) for grads in zip(*shares, strict=True)]
    return Gradients(torch.cat(dqs, 1), torch.cat(dks, 1), torch.cat(dvs, 1), sums)


def heads_at_once(H_k: int, ranks: int) -> int:
    """K/V heads that are gathered together: a divisor of H_k, about 4 H_k / ranks."""
    # Bounds gathered memory to a few times a rank's own.
    most = max(1, 4 * H_k // ranks)
    return max(n for n in range(1, H_k + 1) if H_k % n == 0 and n <= most)


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: ContextPlan, group: ProcessGroup
) -> Iterator[tuple[slice, Tensor, Tensor, Options]]:
    """Yield heads of q, their keys and values of the whole sequence, and their options."""
    H_q, H_k = q.shape[1], k.shape[1]
    step, of_query = heads_at_once(H_k, size_of(group)), H_q // H_k
    order = plan.order.to(k.device)
    coming = _start(k[:, :step], v[:, :step], group)
    for first in range(0, H_k, step):
        buffer, _, work = coming
        work.wait()
        if first + step < H_k:
            following = slice(first + step, first + 2 * step)
            coming = _start(k[:, following], v[:, following], group)
        both = buffer.flatten(0, 1).index_select(0, order).permute(1, 2, 0, 3)
        keys, values = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
        heads = slice(first * of_query, (first + step) * of_query)
        with torch.enable_grad():
            sliced = of_heads(options, H_q, H_k, heads.start, step * of_query)
        yield heads, keys, values, sliced


def _start(k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, dist.Work]:
    """Start gathering [ranks, length, B, heads, D + D_v]. The sent tensor must stay alive."""
    own = torch.cat((k, v), -1).permute(2, 0, 1, 3).contiguous()
    buffer = torch.empty((size_of(group), *own.shape), dtype=own.dtype, device=own.device)
    work = gather_single(buffer.view(-1), own.view(-1), group, async_op=True)
    assert work is not None
    return buffer, own, work
