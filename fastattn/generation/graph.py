"""CUDA graphs of decoding steps with one token per row.

Launching a small model's step takes longer than computing it. A step can be recorded because the
lengths are on the device; attention gets the cache's capacity as their bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.gpt import GPT
from ..models.transfer import to_device
from ..tracing import record_cuda_graph
from .window import Window

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
        *window: Any,
        record: Callable[[Replay], Replay] = record_cuda_graph,
    ) -> None:
        device = next(model.parameters()).device
        if record is record_cuda_graph and device.type != "cuda":
            raise ValueError(f"cuda_graph needs a model on a CUDA device, got one on {device}")
        super().__init__(model, batch_size, *window)
        self._record = record
        self._replay: Replay | None = None
        self._tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None

    def forward(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        # A recorded step writes a slot in every row, also in idle rows. `held` already includes
        # this step's tokens.
        rows, slots = zip(self.held, lengths, strict=True), self.caches[0].max_length
        if tokens.shape[1] != 1 or any(not length and held == slots for held, length in rows):
            return super().forward(tokens, lengths)
        self._tokens.copy_(tokens)
        self._lengths.copy_(to_device(lengths, self.device, torch.int32))
        for cache in self.caches:
            if cache.uniform_length is not None:
                # The lengths stay on the device, with a bound on the host.
                cache.truncate(cache.lengths)
        if self._replay is None:
            before = self.caches[0].lengths.clone()
            # The first run compiles kernels and makes lasting allocations, before recording.
            self._step()
            self._set_lengths(before)
            self._replay = self._record(self._step)
            self._set_lengths(before)
        self._replay()
        for cache in self.caches:
            # A replay does not update the host.
            cache.length_bound = max(self.held)
        assert self._logits is not None
        return self._logits

    def _step(self) -> None:
        for cache in self.caches:
            cache.length_bound = cache.max_length - 1
        how = {"cache": self.caches, "key_lengths": self._lengths, "last_only": True}
        logits = self.model(self._tokens, **how)[0]
        self._logits = torch.empty_like(logits) if self._logits is None else self._logits
        self._logits.copy_(logits)

    def _set_lengths(self, lengths: Tensor) -> None:
        for cache in self.caches:
            cache.lengths.copy_(lengths)
