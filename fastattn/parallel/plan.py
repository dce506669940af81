"""`ContextPlan`: assignment of tokens to ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..score_checks import POSITIONS_BLOCK
from .hops import Assignment, Documents, mark, mask_of, needs
from .pieces import Options, Run, Runs, aligned

BALANCES = ("contiguous", "zigzag", "longest_first")
# Of "auto": work of the busiest rank, over that of the evenest balance, for which longer runs are
# kept; and where hardly any keys would travel.
_TOLERATED, _TOLERATED_NEAR = 1.05, 1.25
# Alignment of a run's positions for kernels.
_ALIGNED = 4


@dataclass(frozen=True)
class ContextPlan:
    """Assignment of the tokens of a sequence of T to ranks, from `ContextPlan.make`.

    Every rank holds `length` tokens in ascending order; positions from T on are padding, at the end
    of a rank's tokens.

    Args:
        T: tokens of the sequence, without padding.
        stretches: ranges (start, stop) of each rank, ascending, padding included.
        block: tokens that stay together.
        balance: how tokens were assigned.
        imbalance: visible pairs of query and key of the busiest rank, over the mean.
        pairs: visible pairs of each rank's queries.
        documents: extents of the plan's documents, if any.
    """

    T: int
    stretches: tuple[Runs, ...]
    block: int
    balance: str
    imbalance: float
    pairs: tuple[int, ...] = ()
    documents: Documents | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def make(
        T: int,
        ranks: int,
        *,
        causal: bool = False,
        window: Any = None,
        documents: Tensor | None = None,
        block: int = 128,
        balance: str = "auto",
    ) -> ContextPlan:
        """Make a plan for `ranks` ranks, from the visible pairs of query and key.

        Args:
            T: any number of tokens: the plan pads, by fewer than 4 tokens per rank.
            ranks: how many ranks share the sequence.
            causal, window: as for `fastattn.attention`.
            documents: ids [B, T] of the whole sequence, as for `fastattn.attention`.
            block: tokens that stay together; a multiple of 128 for kernels.
            balance: "contiguous" keeps a rank's tokens together. "zigzag" gives rank r the r-th
                stretch from the start and the r-th from the end. "longest_first" repeatedly gives
                the block with the most work to the rank with the least. "auto" takes the first of
                these whose busiest rank has at most 5 % more to do than that of the evenest, as
                longer runs send fewer keys; and "contiguous" up to 25 % more where a ring then
                takes a quarter of its hops at most, as even shares of near keys send all keys to
                all ranks.

        Raises:
            TypeError, ValueError: an invalid argument.
        """
        T = checks.check_count("T", T, 1)
        ranks = checks.check_count("ranks", ranks, 1)
        block = checks.check_count("block", block, 1)
        if balance != "auto" and balance not in BALANCES:
            raise ValueError(f"balance must be one of auto, {', '.join(BALANCES)}, got {balance!r}")
        seen = visible_keys(T, causal=causal, window=window, documents=documents)
        before = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), seen.cumsum(0)))
        spans = None if documents is None else Documents(documents)
        plans = []
        for name in BALANCES if balance == "auto" else (balance,):
            stretches = _DEAL[name](T, ranks, block, before)
            pairs = _pairs(stretches, before)
            plans.append(ContextPlan(T, stretches, block, name, _imbalance(pairs), pairs, spans))
        first, least = plans[0], min(plan.imbalance for plan in plans)
        options = {"causal": causal, "window": window, "documents": documents}
        near = len(plans) > 1 and 4 * first.hops(options) < ranks
        if near and first.imbalance <= _TOLERATED_NEAR * least:
            return first
        return next(plan for plan in plans if plan.imbalance <= _TOLERATED * least)

    def mark(self, documents: Tensor) -> None:
        """Record, on every rank, that these ids of its tokens are the plan's documents.

        A ring then need not wait for a GPU to read the ids; ids that change later are read again.
        """
        if self.documents is None:
            raise ValueError("the plan was made without documents")
        mark(documents, self.documents)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return len(self.stretches)

    @property
    def length(self) -> int:
        """Tokens on each rank, padding included."""
        return sum(stop - start for start, stop in self.stretches[0])

    def indices(self, rank: int) -> Tensor:
        """int64 [length]: positions of a rank's tokens in the sequence; from T on, padding."""
        return torch.cat([torch.arange(*stretch, device="cpu") for stretch in self.stretches[rank]])

    def positions(self, rank: int) -> Tensor:
        """int32 [1, length]: `indices` as `positions` of `fastattn.attention`."""
        return self.indices(rank).to(torch.int32)[None]

    def runs(self, rank: int) -> list[Run]:
        """Contiguous ranges [start, stop) of a rank's tokens without padding, in order."""
        return list(self.assignment.runs[rank])

    @cached_property
    def assignment(self) -> Assignment:
        """Runs of all ranks, and the granularity at which keys are sent.

        The granularity keeps aligned runs aligned for kernels.
        """
        whole = self.block % POSITIONS_BLOCK == 0
        grain = POSITIONS_BLOCK if whole else math.lcm(self.block, _ALIGNED)
        return Assignment(self.T, tuple(_runs(own, self.T) for own in self.stretches), grain)

    def real(self, rank: int) -> int:
        """Number of a rank's tokens without padding; they come first."""
        return sum(stop - start for start, stop in self.runs(rank))

    @cached_property
    def aligned(self) -> bool:
        """Whether kernels can use positions: blocks are multiples of 128, or runs."""
        return all(map(aligned, self.assignment.runs))

    def merged(self, degree: int) -> ContextPlan:
        """The plan with each group of `degree` consecutive ranks merged to one rank."""
        starts = range(0, self.ranks, degree)
        groups = (self.stretches[r : r + degree] for r in starts)
        stretches = tuple(tuple(sorted(x for own in group for x in own)) for group in groups)
        pairs = tuple(sum(self.pairs[r : r + degree]) for r in starts) if self.pairs else ()
        return replace(self, stretches=stretches, pairs=pairs, imbalance=_imbalance(pairs))

    def hops(self, options: Options) -> int:
        """How often a ring of the ranks passes keys on.

        Documents count only if the plan has them.
        """
        runs = self.documents if options.get("documents") is not None else None
        masks = {name: x for name, x in options.items() if name != "documents"}
        key = runs is not None, *mask_of(masks)
        if key not in self._hops:
            needed = (
                needs(self.assignment, masks)
                if runs is None
                else runs.needs(self.assignment, masks)
            )
            self._hops[key] = sum(needed.hops)
        return self._hops[key]

    @cached_property
    def _hops(self) -> dict[Any, int]:
        return {}

    @cached_property
    def order(self) -> Tensor:
        """int64 [T]: index of each token in the concatenation of the ranks' tokens."""
        held = torch.cat([self.indices(rank) for rank in range(self.ranks)])
        return held.argsort()[: self.T]

    @cached_property
    def hash(self) -> str:
        """Hash of the assignment, equal in every process."""
        text = repr((self.T, self.assignment.grain, self.stretches))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _runs(stretches: Runs, T: int) -> Runs:
    """Merge adjacent stretches to runs, without padding."""
    runs: list[Run] = []
    for start, stop in stretches:
        stop = min(stop, T)
        if start >= stop:
            break
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return tuple(runs)


def _pairs(stretches: Sequence[Runs], before: Tensor) -> tuple[int, ...]:
    """Count each rank's pairs; before: the number of pairs of all queries before each query."""
    T = len(before) - 1
    return tuple(
        sum(int(before[min(stop, T)] - before[min(start, T)]) for start, stop in own)
        for own in stretches
    )


def _imbalance(pairs: Sequence[int]) -> float:
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0


def visible_keys(
    T: int, *, causal: bool = False, window: Any = None, documents: Tensor | None = None
) -> Tensor:
    """int64 [T]: number of visible keys of each query, over all rows of `documents`; exact.

    Memory is proportional to T.
    """
    left, right = checks.check_window(window)
    position = torch.arange(T, device="cpu")
    first = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    last = torch.full_like(position, T - 1) if right is None else position + right
    last = torch.minimum(last.clamp(max=T - 1), position) if causal else last.clamp(max=T - 1)
    if documents is None:
        return (last - first + 1).clamp(min=0)
    checks.check_input("documents", documents, "integer", "B T", documents, {"T": T})
    total = torch.zeros_like(position)
    for row in documents.cpu().long():
        # Sort keys by document, to find a document's keys by bisection.
        _, ids = row.unique(return_inverse=True)
        keys = (ids * T + position).sort().values
        counts = torch.searchsorted(keys, ids * T + last, right=True)
        counts -= torch.searchsorted(keys, ids * T + first)
        total += counts.clamp(min=0).masked_fill(row < 0, 0)
    return total


def _length(T: int, ranks: int) -> int:
    return -(-T // (ranks * _ALIGNED)) * _ALIGNED


def _contiguous(T: int, ranks: int, block: int, before: Tensor) -> tuple[Runs, ...]:
    length = _length(T, ranks)
    return tuple(((r * length, (r + 1) * length),) for r in range(ranks))


def _zigzag(T: int, ranks: int, block: int, before: Tensor) -> tuple[Runs, ...]:
    """Early stretches are whole blocks, late ones the rest of a rank's tokens."""
    length = _length(T, ranks)
    early = (length // 2 + block // 2) // block * block
    late, end = length - early, length * ranks
    if early == 0 or late <= 0:
        return _contiguous(T, ranks, block, before)
    return tuple(
        ((r * early, (r + 1) * early), (end - (r + 1) * late, end - r * late)) for r in range(ranks)
    )


def _longest_first(T: int, ranks: int, block: int, before: Tensor) -> tuple[Runs, ...]:
    """Graham's rule of 1969, "Bounds on multiprocessing timing anomalies", with equal counts.

    The end of the sequence, less than a block per rank, is split in stretches.
    """
    each = T // (block * ranks)
    main, tail = each * block * ranks, _length(T, ranks) - each * block
    own = [[(main + r * tail, main + (r + 1) * tail)] if tail else [] for r in range(ranks)]
    # A heap of loads; ranks without room are removed.
    with_room = [(load, rank) for rank, load in enumerate(_pairs([tuple(x) for x in own], before))]
    heapify(with_room)
    work = before[: main + 1 : block].diff().tolist()
    for n in sorted(range(len(work)), key=lambda n: (-work[n], n)):
        load, rank = heappop(with_room)
        own[rank].append((n * block, (n + 1) * block))
        if len(own[rank]) < each + (tail > 0):
            heappush(with_room, (load + work[n], rank))
    return tuple(tuple(sorted(stretches)) for stretches in own)


_DEAL: dict[str, Callable[[int, int, int, Tensor], tuple[Runs, ...]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "longest_first": _longest_first,
}
