"""Which tokens each rank holds: blocks dealt out so that every rank computes as many scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .pieces import aligned

BALANCES = ("contiguous", "zigzag", "longest_first")
# "auto" prefers fewer, longer runs of tokens to less imbalance than this.
_TOLERATED = 0.05


@dataclass(frozen=True)
class ContextPlan:
    """A sequence of T tokens cut into blocks, and each rank's blocks. Made by `ContextPlan.make`.

    A rank holds `length` tokens in rising order, the same number on every rank; positions from T on
    are padding, which lies behind a rank's other tokens.

    Args:
        T: tokens of the sequence, without padding.
        blocks: for each rank the numbers of its blocks, rising.
        block: tokens of a block.
        balance: how blocks were dealt out.
        imbalance: the most pairs of query and key that a rank sees, over the mean of all ranks.
    """

    T: int
    blocks: tuple[tuple[int, ...], ...]
    block: int
    balance: str
    imbalance: float

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
        """A plan for `ranks` ranks, from the pairs of query and key that a mask lets through.

        Args:
            T: tokens, of any number: the plan pads.
            ranks: how many ranks share the sequence.
            causal, window: as of `fastattn.attention`.
            documents: ids [B, T] of the whole sequence, as of `fastattn.attention`.
            block: tokens that stay together. Kernels want a multiple of 128.
            balance: "contiguous" keeps a rank's tokens together. "zigzag" gives rank r the r-th
                stretch from the start and the r-th from the end. "longest_first" gives the block
                with the most work left to the rank with the least so far. "auto" takes the first of
                these that has at most 0.05 more imbalance than the best of them.

        Raises:
            TypeError, ValueError: an argument that is none of these.
        """
        T = checks.check_count("T", T, 1)
        ranks = checks.check_count("ranks", ranks, 1)
        block = checks.check_count("block", block, 1)
        if balance != "auto" and balance not in BALANCES:
            raise ValueError(f"balance must be one of auto, {', '.join(BALANCES)}, got {balance!r}")
        each = -(-T // (block * ranks))
        seen = visible_keys(T, causal=causal, window=window, documents=documents)
        padded = torch.zeros(each * ranks * block, dtype=torch.int64)
        padded[:T] = seen
        work: list[int] = padded.view(-1, block).sum(1).tolist()
        names = BALANCES if balance == "auto" else (balance,)
        plans = [ContextPlan._dealt(T, work, ranks, block, name) for name in names]
        best = min(plan.imbalance for plan in plans)
        return next(plan for plan in plans if plan.imbalance <= best + _TOLERATED)

    @staticmethod
    def _dealt(T: int, work: Sequence[int], ranks: int, block: int, balance: str) -> ContextPlan:
        blocks = _DEAL[balance](work, ranks)
        loads = [sum(work[n] for n in own) for own in blocks]
        mean = sum(loads) / ranks
        return ContextPlan(T, blocks, block, balance, max(loads) / mean if mean else 1.0)

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.blocks)

    @property
    def length(self) -> int:
        """Tokens that each rank holds, padding included."""
        return len(self.blocks[0]) * self.block

    def indices(self, rank: int) -> Tensor:
        """int64 [length]: where a rank's tokens stand in the sequence; from T on, padding."""
        starts = torch.tensor(self.blocks[rank]) * self.block
        return (starts[:, None] + torch.arange(self.block)).flatten()

    def positions(self, rank: int) -> Tensor:
        """int32 [1, length]: `indices` as `positions` of `fastattn.attention` takes them."""
        return self.indices(rank).to(torch.int32)[None]

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """The stretches [start, stop) of tokens without a gap that a rank holds, in order.

        Padding is left out.
        """
        found: list[tuple[int, int]] = []
        for n in self.blocks[rank]:
            start, stop = n * self.block, min((n + 1) * self.block, self.T)
            if start >= stop:
                break
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return found

    def real(self, rank: int) -> int:
        """How many of a rank's tokens are no padding: they come first."""
        return sum(stop - start for start, stop in self.runs(rank))

    @cached_property
    def aligned(self) -> bool:
        """Whether kernels can tell each token's position: blocks are a multiple of 128, or runs."""
        return all(aligned(self.runs(rank)) for rank in range(self.ranks))

    def merged(self, degree: int) -> ContextPlan:
        """The plan of groups of `degree` ranks that follow each other, each group one rank."""
        groups = (self.blocks[r : r + degree] for r in range(0, self.ranks, degree))
        blocks = tuple(tuple(sorted(n for own in group for n in own)) for group in groups)
        return ContextPlan(self.T, blocks, self.block, self.balance, self.imbalance)

    @cached_property
    def order(self) -> Tensor:
        """int64 [T]: where each token lies if the ranks' tokens stand behind one another."""
        held = torch.cat([self.indices(rank) for rank in range(self.ranks)])
        return held.argsort()[: self.T]

    @cached_property
    def hash(self) -> str:
        """Equal for plans that deal out the same tokens, in every process."""
        text = repr((self.T, self.block, self.blocks))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def visible_keys(
    T: int, *, causal: bool = False, window: Any = None, documents: Tensor | None = None
) -> Tensor:
    """int64 [T]: how many keys each query sees, over all rows of `documents`; exact.

    Takes memory for T numbers, not for T x T.
    """
    left, right = checks.check_window(window)
    position = torch.arange(T)
    first = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    last = torch.full_like(position, T - 1) if right is None else position + right
    last = torch.minimum(last.clamp(max=T - 1), position) if causal else last.clamp(max=T - 1)
    if documents is None:
        return (last - first + 1).clamp(min=0)
    checks.check_integers("documents", documents)
    if documents.dim() != 2 or documents.shape[1] != T:
        raise ValueError(f"documents must have shape [B, {T}], got {list(documents.shape)}")
    total = torch.zeros_like(position)
    for row in documents.cpu().long():
        # Keys in the order of their documents: those of one are then found by bisection.
        _, ids = row.unique(return_inverse=True)
        keys = (ids * T + position).sort().values
        found = torch.searchsorted(keys, ids * T + last, right=True)
        found -= torch.searchsorted(keys, ids * T + first)
        total += found.clamp(min=0).masked_fill(row < 0, 0)
    return total


Blocks = tuple[tuple[int, ...], ...]


def _contiguous(work: Sequence[int], ranks: int) -> Blocks:
    each = len(work) // ranks
    return tuple(tuple(range(r * each, (r + 1) * each)) for r in range(ranks))


def _zigzag(work: Sequence[int], ranks: int) -> Blocks:
    count = len(work)
    late = count // ranks // 2
    early = count // ranks - late
    return tuple(
        (*range(r * early, (r + 1) * early), *range(count - (r + 1) * late, count - r * late))
        for r in range(ranks)
    )


def _longest_first(work: Sequence[int], ranks: int) -> Blocks:
    """Graham's rule of 1969, "Bounds on multiprocessing timing anomalies", with equal counts."""
    each = len(work) // ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    with_room = [(0, rank) for rank in range(ranks)]  # a heap of loads
    for n in sorted(range(len(work)), key=lambda n: (-work[n], n)):
        load, rank = heappop(with_room)
        own[rank].append(n)
        if len(own[rank]) < each:
            heappush(with_room, (load + work[n], rank))
    return tuple(tuple(sorted(blocks)) for blocks in own)


_DEAL: dict[str, Callable[[Sequence[int], int], Blocks]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "longest_first": _longest_first,
}
