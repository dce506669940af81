"""Whose keys a rank's queries may see, and so how far keys have to go around a ring.

Positions say it at once, from the plan, the window and causal order. Documents are looked at where
each rank holds one stretch of tokens: the ids of two ranks that have no range in common hide them
from each other. All ranks come to the same answer, as they have the same plan, options and ids.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .pieces import Options, may_see
from .plan import ContextPlan

# [r][s]: whether rank r's queries may see a key of rank s.
Seen = tuple[tuple[bool, ...], ...]
# What `may_see` reads. Of prefixes it asks whether there are any.
_READ = ("causal", "window", "stride", "keep_first")
# Runs of a rank, on average, up to which pairs of them are looked at.
_MOST_RUNS = 4
# Ids are gathered for one call, which has one plan.
_by_documents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Hops(NamedTuple):
    """To how many ranks after its own, and to how many before it, each rank's keys go."""

    after: int
    before: int

    @property
    def steps(self) -> list[int]:
        """How far behind a rank those stand whose keys it has, one after the other; its own first.

        A ring goes one way round as far as it has to, and then the other way from the start.
        """
        return [*range(self.after + 1), *range(-1, -self.before - 1, -1)]


def seen(plan: ContextPlan, options: Options) -> Seen:
    """Of the checked options of a call, with the documents of the whole sequence."""
    found = _seen_by_positions(plan, *_mask(options))
    ids = options.get("documents")
    if ids is None or any(len(plan.runs(rank)) > 1 for rank in range(plan.ranks)):
        return found
    together = _with_documents_in_common(ids, plan)
    ranks = range(plan.ranks)
    return tuple(tuple(found[r][s] and together[r][s] for s in ranks) for r in ranks)


def _mask(options: Options) -> tuple[Any, ...]:
    return options.get("prefix_lengths") is not None, *(options.get(name) for name in _READ)


@lru_cache(maxsize=64)
def _seen_by_positions(plan: ContextPlan, prefix: bool, *values: Any) -> Seen:
    options = {name: x for name, x in zip(_READ, values, strict=True) if x is not None}
    options |= {"prefix_lengths": 0} if prefix else {}
    runs = [plan.runs(rank) for rank in range(plan.ranks)]
    if sum(map(len, runs)) > _MOST_RUNS * plan.ranks:
        return ((True,) * plan.ranks,) * plan.ranks
    return tuple(
        tuple(any(may_see(q, k, options) for q in queries for k in keys) for keys in runs)
        for queries in runs
    )


def hops_by_positions(plan: ContextPlan, degree: int, options: Options) -> Hops:
    """`hops` without a look at documents, of groups of `degree` ranks that follow each other."""
    return _hops_by_positions(plan, degree, *_mask(options))


@lru_cache(maxsize=64)
def _hops_by_positions(plan: ContextPlan, degree: int, *mask: Any) -> Hops:
    return hops(_seen_by_positions(plan.merged(degree), *mask))


@lru_cache(maxsize=64)
def hops(found: Seen) -> Hops:
    """The fewest in all that bring every rank what it may see."""
    ranks = len(found)
    # Ranks s with keys for rank r stand (r - s) behind it.
    needed = {(r - s) % ranks for r in range(ranks) for s in range(ranks) if found[r][s]}
    ways = [
        Hops(max((n for n in needed if n < split), default=0),
             max((ranks - n for n in needed if n >= split), default=0))
        for split in range(1, ranks + 1)
    ]  # fmt: skip
    return min(reversed(ways), key=sum)


def _with_documents_in_common(ids: Tensor, plan: ContextPlan) -> list[list[bool]]:
    """[r][s]: whether ids [B, T] of ranks r and s overlap, each rank holding one stretch.

    A call waits once for the device, and its backward finds the answer again. While a CUDA graph
    is captured nothing can be read: then all might.
    """
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return [[True] * plan.ranks] * plan.ranks
    known = _by_documents.get(ids)  # type: ignore[no-untyped-call]
    if known is None:
        at = torch.cat([plan.indices(rank) for rank in range(plan.ranks)]).to(ids.device)
        own = ids.index_select(1, at.clamp(max=plan.T - 1)).masked_fill(at >= plan.T, -1)
        own = own.reshape(len(ids), plan.ranks, -1)
        last = own.amax(-1)  # [B, ranks]
        first = own.masked_fill(own < 0, torch.iinfo(own.dtype).max).amin(-1)
        meet = first[:, :, None] <= last[:, None, :]
        known = (meet & meet.mT).any(0).tolist()
        _by_documents[ids] = known
    found: list[list[bool]] = known
    return found
