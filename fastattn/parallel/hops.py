"""Visibility between ranks: how far and which keys travel around a ring.

Causal and window bound a query's keys by its position, documents by their extents. All ranks
compute the same result, from the same plan, options and ids.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import checks
from .pieces import Options, Run, Runs

# Options that bounds depend on; of prefix_lengths only their presence.
_READ = ("causal", "window", "stride", "keep_first")
# Average runs per rank up to which documents on a GPU are read, which waits for it.
_FEW_RUNS = 2
# Cached `Documents` by ids of whole sequences; for backward, and for plans with documents.
_documents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Version of a rank's ids at `mark`.
_marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Assignment(NamedTuple):
    """Tokens of a sequence of T on each rank, without padding.

    grain: keys are sent in blocks of this size, counted from the start of a run.
    """

    T: int
    runs: tuple[Runs, ...]
    grain: int


class Hops(NamedTuple):
    """Number of later and earlier ranks that each rank's keys are sent to."""

    after: int
    before: int

    @property
    def steps(self) -> list[int]:
        """Distances to the ranks whose keys a rank gets: its own, one way, then the other."""
        return [*range(self.after + 1), *range(-1, -self.before - 1, -1)]


class Bounds(NamedTuple):
    """First and last key [T] that each query may see in any batch row, by position.

    Without visible keys, the first is after the last. kept: the last one of keep_first, or -1.
    """

    first: Tensor
    last: Tensor
    kept: Tensor


def bounds(T: int, options: Options, documents: "Documents | None" = None) -> Bounds:
    """`Bounds` from a call's checked options."""
    at = torch.arange(T, device="cpu")
    left, right = checks.check_window(options.get("window"))
    left = None if options.get("stride") is not None else left
    causal = options.get("causal") and options.get("prefix_lengths") is None
    right = 0 if causal and (right is None or right > 0) else right
    right = None if options.get("stride") is not None and not causal else right
    end = torch.full_like(at, T - 1)
    first = torch.zeros_like(at) if left is None else (at - left).clamp(min=0)
    last = end if right is None else (at + right).clamp(max=T - 1)
    kept = (at if causal else end).clamp(max=options.get("keep_first", 0) - 1)
    if documents is not None:
        first = torch.maximum(first, documents.first)
        last, kept = (torch.minimum(x, documents.last) for x in (last, kept))
    return Bounds(first, last, kept)


class Documents:
    """Extents of documents: first and last token [T] of each token's document, on the host.

    With several batch rows, the union over rows. For tokens that are padding in every row, the
    first is after the last. ids: [B, T]; waits for a GPU.
    """

    def __init__(self, ids: Tensor) -> None:
        B, T = ids.shape
        at = torch.arange(T, device=ids.device).expand(B, T).flatten()
        values, number = torch.unique(ids.long(), return_inverse=True)
        number = (number + torch.arange(B, device=ids.device)[:, None] * len(values)).flatten()
        size = B * len(values)
        begin = number.new_full((size,), T).scatter_reduce(0, number, at, "amin")[number]
        end = number.new_full((size,), -1).scatter_reduce(0, number, at, "amax")[number]
        padding = ids < 0
        self.first = begin.view(B, T).masked_fill(padding, T).amin(0).cpu()
        self.last = end.view(B, T).masked_fill(padding, -1).amax(0).cpu()
        self._needs: dict[Any, Needs] = {}

    def needs(self, assignment: Assignment, options: Options) -> "Needs":
        """`Needs` from a call's checked options."""
        key = (assignment, mask_of(options))
        if key not in self._needs:
            self._needs[key] = Needs(assignment, bounds(assignment.T, options, self))
        return self._needs[key]


def mark(own: Tensor, documents: Documents) -> None:
    """Record, on every rank, the documents of its current ids: calls need not read the device."""
    if not own.is_inference():
        _marked[own] = own._version, documents


def marked(own: Tensor | None) -> Documents | None:
    """Documents recorded by `mark` for a rank's ids, if the ids have not changed."""
    if own is None or own.is_inference():
        return None
    version, documents = _marked.get(own, (None, None))  # type: ignore[no-untyped-call]
    current: Documents | None = documents if version == own._version else None
    return current


def remember(ids: Tensor, documents: Documents) -> None:
    """Cache the documents of a whole sequence's ids [B, T]."""
    _documents[ids] = documents


class Needs:
    """Keys of each rank that each rank's queries may see, by blocks of keys."""

    def __init__(self, assignment: Assignment, limits: Bounds) -> None:
        self.assignment = assignment
        grain, T = assignment.grain, assignment.T
        ends = [0, *accumulate(map(len, assignment.runs))]
        # Numbers of a rank's runs, counted over all ranks.
        self._numbers = [slice(*both) for both in pairwise(ends)]
        pieces = sorted(
            (start, min(start + grain, run[1]), rank, ends[rank] + n)
            for rank, runs in enumerate(assignment.runs)
            for n, run in enumerate(runs)
            for start in range(*run, grain)
        )
        columns = torch.tensor(pieces, device="cpu").view(-1, 4).mT.contiguous()
        self._starts, self._stops, self._owners, self._run_of = columns
        # Per piece of queries; pieces cover the sequence in order.
        piece = torch.repeat_interleave(
            torch.arange(len(pieces), device="cpu"), self._stops - self._starts
        )
        first = torch.full_like(self._starts, T).scatter_reduce(0, piece, limits.first, "amin")
        last = torch.full_like(self._starts, -1).scatter_reduce(0, piece, limits.last, "amax")
        kept = torch.full_like(self._starts, -1).scatter_reduce(0, piece, limits.kept, "amax")
        self._needed = self._marked(first, last) | self._marked(torch.zeros_like(first), kept)

    def _marked(self, first: Tensor, last: Tensor) -> Tensor:
        """[ranks, pieces]: whether a rank's queries see a piece's keys."""
        some = first <= last
        begin = torch.searchsorted(self._stops, first, right=True)[some]
        end = torch.searchsorted(self._starts, last, right=True)[some]
        edges = torch.zeros(
            len(self.assignment.runs), len(self._starts) + 1, dtype=torch.int32, device="cpu"
        )
        one = torch.ones_like(begin, dtype=torch.int32)
        edges.index_put_((self._owners[some], begin), one, accumulate=True)
        edges.index_put_((self._owners[some], end), -one, accumulate=True)
        return edges.cumsum(1)[:, :-1] > 0

    @cached_property
    def seen(self) -> tuple[tuple[bool, ...], ...]:
        """[r][s]: whether rank r's queries may see a key of rank s."""
        ranks = len(self.assignment.runs)
        counts = torch.zeros(ranks, ranks, dtype=torch.int64, device="cpu")
        counts.index_add_(1, self._owners, self._needed.long())
        return tuple(map(tuple, (counts > 0).tolist()))

    @cached_property
    def hops(self) -> Hops:
        """The fewest total hops that bring every rank its visible keys."""
        ranks = len(self.assignment.runs)
        seen = torch.tensor(self.seen, device="cpu")
        r, s = seen.nonzero(as_tuple=True)
        # Rank s with keys for rank r is (r - s) steps behind it.
        needed = sorted({*((r - s) % ranks).tolist()})
        ways = [
            Hops(max((n for n in needed if n < split), default=0),
                 max((ranks - n for n in needed if n >= split), default=0))
            for split in range(1, ranks + 1)
        ]  # fmt: skip
        return min(reversed(ways), key=sum)

    def runs(self, rank: int, step: int) -> Runs:
        """Runs of a rank's keys that are sent to the rank `step` after it.

        Keys that this or a later rank on the way may see; one stretch of each run.
        """
        if step == 0:
            return self.assignment.runs[rank]
        first, stop = (x[self._numbers[rank]].tolist() for x in self._sent[step])
        return tuple(run for run in zip(first, stop, strict=True) if run[0] < run[1])

    @cached_property
    def _sent(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Begin and end, by step, of the keys sent from each run; equal if none."""
        sent = {}
        ranks, every = len(self.assignment.runs), torch.arange(len(self._starts), device="cpu")
        runs = sum(map(len, self.assignment.runs))
        for steps in (range(self.hops.after, 0, -1), range(-self.hops.before, 0)):
            some = torch.zeros_like(self._starts, dtype=torch.bool)
            for step in steps:
                some = some | self._needed[(self._owners + step) % ranks, every]
                number = self._run_of[some]
                first = torch.full((runs,), self.assignment.T, device="cpu")
                first.scatter_reduce_(0, number, self._starts[some], "amin")
                stop = torch.zeros(runs, dtype=torch.int64, device="cpu")
                stop.scatter_reduce_(0, number, self._stops[some], "amax")
                sent[step] = torch.minimum(first, stop), stop
        return sent


def total(runs: Sequence[Run]) -> int:
    """Tokens of runs."""
    return sum(stop - start for start, stop in runs)


def needs(assignment: Assignment, options: Options) -> Needs:
    """`Needs` from a call's checked options and whole documents.

    Reading documents on a GPU waits for it, once per call. They are not read during CUDA graph
    capture, or if ranks hold many short runs, which mostly all see each other.
    """
    ids = options.get("documents")
    if ids is None:
        return _needs_by_positions(assignment, *mask_of(options))
    if ids not in _documents:
        few = sum(map(len, assignment.runs)) <= _FEW_RUNS * len(assignment.runs)
        if ids.is_cuda and (not few or torch.cuda.is_current_stream_capturing()):
            return _needs_by_positions(assignment, *mask_of(options))
        remember(ids, Documents(ids))
    documents: Documents = _documents[ids]
    return documents.needs(assignment, options)


def mask_of(options: Options) -> tuple[Any, ...]:
    """Mask options that bounds depend on, except documents."""
    return options.get("prefix_lengths") is not None, *(options.get(name) for name in _READ)


@lru_cache(maxsize=64)
def _needs_by_positions(assignment: Assignment, prefix: bool, *values: Any) -> Needs:
    options = {name: x for name, x in zip(_READ, values, strict=True) if x is not None}
    options |= {"prefix_lengths": 0} if prefix else {}
    return Needs(assignment, bounds(assignment.T, options))
