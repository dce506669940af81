"""Decode steps of one token per row, replayed as a CUDA graph.

Launching a small model's step takes longer than computing it; a graph is launched at once. It can
be recorded as nothing in such a step depends on the host: lengths are on the device, and attention
gets the cache's capacity as their bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache.paged import PagedKVCache
from ..functional.merge import shared_pages
from ..models.gpt import GPT
from ..models.transfer import to_device
from ..tracing import record_cuda_graph
from .paged import PackedRows, PackedStep
from .window import PastContext, Window

# Replays a function on the same tensors.
Replay = Callable[[], object]


class GraphWindow(Window):
    """A `Window` that replays its steps of one token per row.

    Prompts, and steps in which a row starts a new window, run without the graph.

    model: on a CUDA device, unless `record` is given; its parameters keep their memory. record:
    makes a replay of a function that reads and writes fixed tensors.
    """

    def __init__(
        self,
        model: GPT,
        batch_size: int,
        max_tokens: int | None = None,
        past_context: PastContext = "restart",
        *,
        record: Callable[[Replay], Replay] | None = None,
    ) -> None:
        self._record = _recorder(model, record)
        super().__init__(model, batch_size, max_tokens, past_context)
        self._tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=self.device)
        self._lengths = torch.zeros(batch_size, dtype=torch.int32, device=self.device)
        self._logits: Tensor | None = None
        self._replay: Replay | None = None

    def forward(self, tokens: Tensor, lengths: Sequence[int], last_only: bool) -> Tensor:
        # A recorded step writes a slot in every row, also in idle rows. `held` already includes
        # this step's tokens.
        slots = self.caches[0].max_length
        rows = zip(self.held, lengths, strict=True)
        if tokens.shape[1] != 1 or any(not length and held == slots for held, length in rows):
            return super().forward(tokens, lengths, last_only)
        self._tokens.copy_(tokens)
        self._lengths.copy_(to_device(lengths, self.device, torch.int32))
        for cache in self.caches:
            if cache.uniform_length is not None:
                # The lengths stay on the device, with a bound on the host.
                cache.truncate(cache.lengths)
        if self._replay is None:
            self._replay = self._recorded()
        self._replay()
        for cache in self.caches:
            # A replay does not update the host.
            cache.length_bound = max(self.held)
        assert self._logits is not None
        return self._logits

    def _recorded(self) -> Replay:
        before = self.caches[0].lengths.clone()

        def step() -> None:
            for cache in self.caches:
                cache.length_bound = cache.max_length - 1
            logits, _ = self.model(
                self._tokens, cache=self.caches, key_lengths=self._lengths, last_only=True
            )
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits.copy_(logits)

        def undo() -> None:
            for cache in self.caches:
                cache.lengths.copy_(before)

        # The first run compiles kernels and makes lasting allocations, which must precede
        # recording.
        step()
        undo()
        replay = self._record(step)
        undo()
        return replay


class _PagedGraph:
    """A recorded step of up to `size` rows, writing `logits`; unused tokens have slot -1.

    groups: the most groups of rows that share pages.
    """

    def __init__(
        self, model: GPT, cache: PagedKVCache, size: int, groups: int,
        record: Callable[[Replay], Replay],
    ) -> None:  # fmt: skip
        self.size, self._groups = size, groups
        device = cache.lengths.device
        self._slots = torch.full((size,), -1, dtype=torch.int64, device=device)
        # Tokens, positions, rows, offsets, groups and their shared pages, in one copy.
        parts = [size, size, size, size + 1, groups + 1, groups]
        self._numbers = torch.zeros(sum(parts), dtype=torch.int64, device=device)
        tokens, positions, index, offsets, bounds, lengths = torch.split(self._numbers, parts)
        room = cache.block_table.shape[1] * cache.page_size
        of_row = torch.arange(size, device=device)
        step = PackedStep(self._slots, positions, of_row, offsets, 1, room)
        views = [
            cache.view([], layer)._replace(batch_index=index, length_bound=room)
            for layer in range(cache.num_layers)
        ]
        self.logits: Tensor | None = None

        def work() -> None:
            shared = shared_pages(views[0], offsets, bounds, lengths) if groups else None
            layers = [PackedRows(view, step._replace(shared=shared)) for view in views]
            logits = model(tokens[:, None], cache=layers)[0][:, -1]
            if self.logits is None:
                self.logits = torch.empty_like(logits)
            self.logits.copy_(logits)

        # The first run compiles kernels and makes lasting allocations. No token has a row yet.
        work()
        self.replay = record(work)

    def enter(
        self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], slots: Tensor,
        bounds: Sequence[int], lengths: Sequence[int],
    ) -> None:  # fmt: skip
        """Set inputs of the next replay; bounds, lengths: of groups of rows that share tokens."""
        n, unused = len(rows), self._groups - len(lengths)
        rest = [0] * (self.size - n)
        offsets = [*range(n + 1), *(n for _ in rest)]
        numbers = [*tokens, *rest, *positions, *rest, *rows, *rest, *offsets]
        numbers += [*bounds, *[bounds[-1]] * unused, *lengths, *[0] * unused]
        self._numbers.copy_(to_device(numbers, self._numbers.device))
        self._slots[:n] = slots
        self._slots[n:] = -1


class PagedGraphs:
    """Steps of one token per row over a paged cache, replayed by graphs of a few sizes.

    The smallest graph that has room for a step's rows serves it: 1, 2, 4, 8, ... rows, recorded at
    the first step that needs them; steps whose rows share pages have graphs of their own.

    model, record: as for `GraphWindow`. max_batch: the most rows of a step.
    """

    def __init__(
        self,
        model: GPT,
        cache: PagedKVCache,
        max_batch: int,
        *,
        record: Callable[[Replay], Replay] | None = None,
    ) -> None:
        self._record = _recorder(model, record)
        self._model, self._cache, self._max_batch = model, cache, max_batch
        self._graphs: dict[tuple[int, int], _PagedGraph] = {}

    def scores(
        self, tokens: Sequence[int], rows: Sequence[int],
        shared: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Tensor:  # fmt: skip
        """Scores [B, V] after the next token of each of B rows, which is counted and written.

        The next call may overwrite them. shared: as for `paged.layers_of`.
        """
        size = min(1 << (len(rows) - 1).bit_length(), self._max_batch)
        groups = 0 if shared is None else size // 2
        graph = self._graphs.get((size, groups))
        if graph is None:
            graph = _PagedGraph(self._model, self._cache, size, groups, self._record)
            self._graphs[size, groups] = graph
        positions = [self._cache.length(row) for row in rows]
        slots = self._cache.extend(rows, 1)
        graph.enter(tokens, positions, rows, slots, *(shared or ([0], [])))
        graph.replay()
        assert graph.logits is not None
        return graph.logits[: len(rows)]


def _recorder(model: GPT, record: Callable[[Replay], Replay] | None) -> Callable[[Replay], Replay]:
    """`record`, or by default CUDA graphs, which need a model on a CUDA device."""
    device = next(model.parameters()).device
    if record is None and device.type != "cuda":
        raise ValueError(f"cuda_graph needs a model on a CUDA device, got one on {device}")
    return record or record_cuda_graph
