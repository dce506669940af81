"""Ulysses: ranks exchange tokens for heads, so that each has all tokens for some heads.

Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509. If key heads are not a multiple of the
ranks, keys are repeated first.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import along
from .pieces import Options, of_heads
from .plan import ContextPlan
from .ranks import Ranks, exchange, rank_in

# Options with a dim of the queries.
_OF_QUERIES = tuple(name for name in along("T_q") if name != "q_documents")


class Exchanged(NamedTuple):
    """A call after the exchange: ranks of an inner group hold different heads, same tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: ContextPlan, ranks: Ranks
) -> Exchanged:
    """This rank's heads of the inner group's tokens, in order; differentiable."""
    U, H_q, H_k = ranks.degree, q.shape[1], k.shape[1]
    order = _order(plan, ranks).argsort().to(q.device)
    repeats = math.lcm(H_k, U) // H_k
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    exchanged = dict(options)
    for name in _OF_QUERIES:
        x = exchanged.get(name)
        if x is not None and x.shape[-2] == plan.length:
            exchanged[name] = _exchanged(x, H_q, ranks).index_select(-2, order)
    exchanged = of_heads(exchanged, H_q, H_k, rank_in(ranks.inner) * (H_q // U), H_q // U)
    q, k, v = (_exchanged(x, x.shape[1], ranks).index_select(2, order) for x in (q, k, v))
    return Exchanged(q, k, v, exchanged)


def to_tokens(x: Tensor, plan: ContextPlan, ranks: Ranks) -> Tensor:
    """Inverse exchange: [B, H_q, length, ...] of this rank's tokens."""
    U = ranks.degree
    x = x.index_select(2, _order(plan, ranks).to(x.device))
    shape = (*x.shape[:2], U, plan.length, *x.shape[3:])
    received = exchange(x.reshape(shape).movedim(2, 0), ranks.inner)  # [U, B, H_q / U, length, ...]
    return received.movedim(0, 1).flatten(1, 2)


def _order(plan: ContextPlan, ranks: Ranks) -> Tensor:
    """Sorted order of the inner group's concatenated tokens."""
    first = ranks.rank - rank_in(ranks.inner)
    held = torch.cat([plan.indices(first + u) for u in range(ranks.degree)])
    return held.argsort().argsort()


def _exchanged(x: Tensor, H: int, ranks: Ranks) -> Tensor:
    """x [B, H or 1, length, ...] as [B, H / U or 1, U length, ...]: tokens by rank, unsorted."""
    U = ranks.degree
    x = x[(None,) * (4 - x.dim())]
    by_head = x.shape[1] == H
    split = (x.shape[0], U, H // U, *x.shape[2:])
    sent = x.reshape(split).movedim(1, 0) if by_head else x.expand(U, *x.shape)
    dtype = x.dtype
    if dtype == torch.bool:
        sent = sent.to(torch.uint8)
    received = exchange(sent, ranks.inner)
    return received.to(dtype).movedim(0, 2).flatten(2, 3)
