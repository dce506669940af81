"""A text and its drafts, a chain or a tree, scored by one pass of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.gpt import GPT
from ..models.model_config import RELATIVE
from ..models.sampling import check_finite
from ..models.stack import evaluating
from ..models.transfer import to_device
from .paged import layers_of
from .window import Reading, Window

_PAGE_SIZE = 16


class Chain:
    """A chain of drafts: appended to the text, and taken back if rejected."""

    def __init__(self, model: GPT, longest: int) -> None:
        self._window = Window(model, 1, longest)
        self._ahead = 0  # drafts that are read

    @property
    def room(self) -> int:
        """Tokens that can be read before a new window starts."""
        return self._window.room(0)

    def holds(self, drafts: int) -> bool:
        """Whether this many drafts fit, if necessary in a new window."""
        return True

    def read(
        self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Tensor:
        """Read the text's next tokens, then its unread drafts; logits [n, V] after both."""
        piece = [*tokens, *drafts[self._ahead :]]
        self._ahead = len(drafts)
        logits = self._window.read([piece], last_only=not drafts)
        return logits.reshape(-1, logits.shape[-1])

    def keep(self, path: Sequence[int]) -> int:
        """Accept the drafts of a path, drop the others; return how many accepted ones were read."""
        held = min(len(path), self._ahead)
        if self._ahead > held:
            self._window.take_back([self._ahead - held])
        self._ahead = 0
        return held


class Tree:
    """A tree of drafts: a row of a paged cache in which each draft sees its ancestors.

    Methods: as of `Chain`. nodes: the most drafts at a time. ValueError if the model's scores
    depend on distances, which slots do not have.
    """

    def __init__(self, model: GPT, longest: int, nodes: int) -> None:
        config = model.config
        distant = {"window": config.window, "stride": config.stride}
        wrong = [f"{name}={x}" for name, x in distant.items() if x is not None]
        if config.positions in (*RELATIVE, "alibi"):
            wrong.append(f"positions={config.positions!r}")
        if config.scoring == "additive":
            wrong.append("scoring='additive'")
        if wrong:
            raise ValueError(
                "drafts must be one number, a chain, for a model whose attention goes by distances "
                f"or is additive, got a tree for {' and '.join(wrong)}"
            )
        self._model, self._context = model, config.context_length
        slots = min(longest + nodes, self._context)
        self.cache = model.new_paged_cache(-(-slots // _PAGE_SIZE), _PAGE_SIZE, max_rows=1)
        self._row, self._reading = self.cache.allocate(), Reading(self._context)
        self._drafts: list[int] = []
        self._device = next(model.parameters()).device

    @property
    def room(self) -> int:
        """Tokens and drafts that can be read before a new window starts."""
        return self._context - self._reading.held

    def holds(self, drafts: int) -> bool:
        """Whether so many drafts can be read."""
        return drafts <= self.room

    def read(
        self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Tensor:
        """Read the text's next tokens, followed by drafts that replace the former ones.

        Args:
            drafts: each behind its parent.
            parents: number of each draft's parent; -1: the text.

        Returns:
            logits [n, V] after all tokens, if any, and after each draft.
        """
        tokens, forgotten = self._reading.enter(tokens)
        held = self._reading.held
        self.cache.truncate(self._row, 0 if forgotten else held - len(tokens))
        self._drafts = list(drafts)
        n = len(tokens)
        depth: list[int] = []  # number of ancestors of each draft
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        places = [*range(held - n, held), *(held + d for d in depth)]
        tree = to_device(_seen(n, parents), self._device, torch.bool) if drafts else None
        layers = layers_of(self.cache, [self._row], [n + len(drafts)], places, tree)
        packed = to_device([*tokens, *drafts], self._device)[:, None]
        rows = to_device(list(range(max(0, n - 1), n + len(drafts))), self._device)
        with evaluating(self._model):
            logits = self._model(packed, cache=layers, rows=rows)[0][:, -1]
        check_finite(logits)
        return logits

    def keep(self, path: Sequence[int]) -> int:
        """Accept a path, as `Chain.keep`; its keys and values are compacted."""
        held = [node for node in path if node < len(self._drafts)]
        first = self._reading.held
        self.cache.compact(self._row, first, [first + node for node in held])
        self._reading.enter(self._drafts[node] for node in held)
        self._drafts = []
        return len(held)


def _seen(n: int, parents: Sequence[int]) -> list[list[bool]]:
    """Tree mask of n tokens and the drafts after them."""
    total = n + len(parents)
    rows = [[j <= i for j in range(total)] for i in range(n)]
    for i, parent in enumerate(parents):
        before = rows[n + parent] if parent >= 0 else [j < n for j in range(total)]
        rows.append([seen or j == n + i for j, seen in enumerate(before)])
    return rows
