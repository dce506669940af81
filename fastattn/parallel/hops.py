"""Which keys each rank's queries may see: how far keys go around a ring, and which of them.

Causal order and window bound the keys of a query by its position, documents by where their tokens
begin and end. All ranks come to the same answer, as they have the same plan, options and ids.
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

# What bounds read. Of prefixes they ask whether there are any.
_READ = ("causal", "window", "stride", "keep_first")
# Runs of a rank, on average, up to which a GPU is waited for to see its documents.
_FEW_RUNS = 2
# Of ids of whole sequences what is known of them; for a backward, and where a plan knows it.
_documents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Of a rank's ids, in which version of them they are those that a plan was made for.
_marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Dealt(NamedTuple):
    """Which tokens of a sequence of T each rank holds, without padding.

    grain: keys are sent in blocks of so many, counted from the start of a run.
    """

    T: int
    runs: tuple[Runs, ...]
    grain: int


class Hops(NamedTuple):
    """To how many ranks after its own, and to how many before it, each rank's keys go."""

    after: int
    before: int

    @property
    def steps(self) -> list[int]:
        """Distances of the ranks behind a rank whose keys it gets, in their order; its own first.

        A ring goes one way round as far as it has to, and then the other way from the start.
        """
        return [*range(self.after + 1), *range(-1, -self.before - 1, -1)]


class Bounds(NamedTuple):
    """The first and the last key [T] that each query may see in any batch row, by position.

    A query that sees none has a first key behind its last one. keep_first: how many first keys are
    seen beside these, where documents do not hide them.
    """

    first: Tensor
    last: Tensor
    keep_first: int = 0


def bounds(T: int, options: Options, documents: "Documents | None" = None) -> Bounds:
    """Find the first and last visible key of each query, from a call's checked options."""
    at = torch.arange(T)
    left, right = checks.check_window(options.get("window"))
    left = None if options.get("stride") is not None else left
    causal = options.get("causal") and options.get("prefix_lengths") is None
    right = 0 if causal and (right is None or right > 0) else right
    right = None if options.get("stride") is not None and not causal else right
    first = torch.zeros_like(at) if left is None else (at - left).clamp(min=0)
    last = torch.full_like(at, T - 1) if right is None else (at + right).clamp(max=T - 1)
    if documents is not None:
        first = torch.maximum(first, documents.first)
        last = torch.minimum(last, documents.last)
    return Bounds(first, last, 0 if left is None else options.get("keep_first", 0))


class Documents:
    """Where documents begin and end: the first and the last token [T] of each token's, on the host.

    Of several batch rows, all that the document of any of them spans. A token that is padding in
    every row has its first token behind its last one.

    Args:
        ids: [B, T]. On a GPU it is waited for.
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

    def needs(self, dealt: Dealt, options: Options) -> "Needs":
        """Find the keys that ranks need, from a call's checked options."""
        key = (dealt, mask_of(options))
        if key not in self._needs:
            self._needs[key] = Needs(dealt, bounds(dealt.T, options, self))
        return self._needs[key]


def mark(own: Tensor, documents: Documents) -> None:
    """Note that a rank's ids, as they are now, belong to a sequence with these documents.

    Then no call looks at them on a device. Every rank does it alike.
    """
    if not own.is_inference():
        _marked[own] = own._version, documents


def marked(own: Tensor | None) -> Documents | None:
    """Return the documents that `mark` noted for a rank's ids, if the ids have not changed."""
    if own is None or own.is_inference():
        return None
    version, documents = _marked.get(own, (None, None))  # type: ignore[no-untyped-call]
    current: Documents | None = documents if version == own._version else None
    return current


def remember(ids: Tensor, documents: Documents) -> None:
    """Notes what is known of the ids [B, T] of a whole sequence."""
    _documents[ids] = documents


class Needs:
    """Keys of each rank that the queries of each rank may see, by blocks of keys."""

    def __init__(self, dealt: Dealt, limits: Bounds) -> None:
        self.dealt = dealt
        grain, T = dealt.grain, dealt.T
        ends = [0, *accumulate(map(len, dealt.runs))]
        # Numbers of a rank's runs, which are counted through all ranks.
        self._numbers = [slice(*both) for both in pairwise(ends)]
        pieces = sorted(
            (start, min(start + grain, run[1]), rank, ends[rank] + n)
            for rank, runs in enumerate(dealt.runs)
            for n, run in enumerate(runs)
            for start in range(*run, grain)
        )
        columns = torch.tensor(pieces).view(-1, 4).mT.contiguous()
        self._starts, self._stops, self._owners, self._run_of = columns
        # Of a piece's queries: the pieces cover the sequence in order.
        piece = torch.repeat_interleave(torch.arange(len(pieces)), self._stops - self._starts)
        first = torch.full_like(self._starts, T).scatter_reduce(0, piece, limits.first, "amin")
        last = torch.full_like(self._starts, -1).scatter_reduce(0, piece, limits.last, "amax")
        self._needed = self._marked(first, last)
        if limits.keep_first:
            # Documents, which the bounds have met, may hide these keys too: that is not looked at.
            some = first <= last
            end = torch.minimum(last, torch.full_like(last, limits.keep_first - 1))
            zero = torch.zeros_like(first).masked_fill(~some, T)
            self._needed |= self._marked(zero, end)

    def _marked(self, first: Tensor, last: Tensor) -> Tensor:
        """[ranks, pieces]: whether some piece of a rank's queries sees a piece's keys."""
        some = first <= last
        begin = torch.searchsorted(self._stops, first, right=True)[some]
        end = torch.searchsorted(self._starts, last, right=True)[some]
        edges = torch.zeros(len(self.dealt.runs), len(self._starts) + 1, dtype=torch.int32)
        one = torch.ones_like(begin, dtype=torch.int32)
        edges.index_put_((self._owners[some], begin), one, accumulate=True)
        edges.index_put_((self._owners[some], end), -one, accumulate=True)
        return edges.cumsum(1)[:, :-1] > 0

    @cached_property
    def seen(self) -> tuple[tuple[bool, ...], ...]:
        """[r][s]: whether rank r's queries may see a key of rank s."""
        ranks = len(self.dealt.runs)
        counts = torch.zeros(ranks, ranks, dtype=torch.int64)
        counts.index_add_(1, self._owners, self._needed.long())
        return tuple(map(tuple, (counts > 0).tolist()))

    @cached_property
    def hops(self) -> Hops:
        """The fewest hops in all that bring every rank what it may see."""
        ranks = len(self.dealt.runs)
        seen = torch.tensor(self.seen)
        r, s = seen.nonzero(as_tuple=True)
        # Ranks s with keys for rank r stand (r - s) behind it.
        needed = sorted({*((r - s) % ranks).tolist()})
        ways = [
            Hops(max((n for n in needed if n < split), default=0),
                 max((ranks - n for n in needed if n >= split), default=0))
            for split in range(1, ranks + 1)
        ]  # fmt: skip
        return min(reversed(ways), key=sum)

    def runs(self, rank: int, step: int) -> Runs:
        """Runs of a rank's keys that go to the rank `step` behind it.

        Those that this one or a rank beyond it on the way may see; of each run one stretch.
        """
        if step == 0:
            return self.dealt.runs[rank]
        first, stop = (x[self._numbers[rank]].tolist() for x in self._sent[step])
        return tuple(run for run in zip(first, stop, strict=True) if run[0] < run[1])

    @cached_property
    def _sent(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Begin and end, by step, of the keys sent from each run; equal where none is sent."""
        sent = {}
        ranks, every = len(self.dealt.runs), torch.arange(len(self._starts))
        runs = sum(map(len, self.dealt.runs))
        for way in (range(self.hops.after, 0, -1), range(-self.hops.before, 0)):
            some = torch.zeros_like(self._starts, dtype=torch.bool)
            for step in way:
                some = some | self._needed[(self._owners + step) % ranks, every]
                number = self._run_of[some]
                first = torch.full((runs,), self.dealt.T)
                first.scatter_reduce_(0, number, self._starts[some], "amin")
                stop = torch.zeros(runs, dtype=torch.int64)
                stop.scatter_reduce_(0, number, self._stops[some], "amax")
                sent[step] = torch.minimum(first, stop), stop
        return sent

    @cached_property
    def way(self) -> "Way":
        """Traffic around the ring: for each hop, the most that a rank passes on."""
        most = max(map(total, self.dealt.runs))
        owner = torch.tensor([rank for rank, runs in enumerate(self.dealt.runs) for _ in runs])
        share = {}
        for step, (first, stop) in self._sent.items():
            of_rank = torch.zeros(len(self.dealt.runs), dtype=torch.int64)
            share[step] = int(of_rank.index_add_(0, owner, stop - first).max()) / most
        after, before = self.hops
        # Gradients go as far as keys do, each time of all that its rank had sent.
        behind = after * share.get(1, 0.0) + before * share.get(-1, 0.0)
        return Way(after + before, sum(share.values()), behind)


class Way(NamedTuple):
    """Traffic around a ring: hops, and sums over them of the shares of a rank's keys that travel.

    keys: for keys that are sent on. gradients: for gradients of keys, which follow and go home.
    """

    hops: int
    keys: float
    gradients: float


def total(runs: Sequence[Run]) -> int:
    """Tokens of runs."""
    return sum(stop - start for start, stop in runs)


def needs(dealt: Dealt, options: Options) -> Needs:
    """Find the keys that ranks need, from a call's checked options and whole documents.

    To read documents on a GPU, the host waits for it, once a call. They are not read while a CUDA
    graph is captured, nor where ranks hold many short runs, which mostly all see each other.
    """
    ids = options.get("documents")
    if ids is None:
        return _needs_by_positions(dealt, *mask_of(options))
    if ids not in _documents:
        if ids.is_cuda and not _may_look(dealt):
            return _needs_by_positions(dealt, *mask_of(options))
        remember(ids, Documents(ids))
    documents: Documents = _documents[ids]
    return documents.needs(dealt, options)


def _may_look(dealt: Dealt) -> bool:
    few = sum(map(len, dealt.runs)) <= _FEW_RUNS * len(dealt.runs)
    return few and not torch.cuda.is_current_stream_capturing()


def mask_of(options: Options) -> tuple[Any, ...]:
    """Collect the mask options that bounds read, except documents."""
    return options.get("prefix_lengths") is not None, *(options.get(name) for name in _READ)


@lru_cache(maxsize=64)
def _needs_by_positions(dealt: Dealt, prefix: bool, *values: Any) -> Needs:
    options = {name: x for name, x in zip(_READ, values, strict=True) if x is not None}
    options |= {"prefix_lengths": 0} if prefix else {}
    return Needs(dealt, bounds(dealt.T, options))
