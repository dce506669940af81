"""Next-token prediction over token files: windows of packed documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ..data.prepared import PreparedText
from ..data.rows import IGNORED
from ..data.text import DataError
from .task import Batch, Split, Task

# Of a text of a billion tokens a tenth would take longer to measure than it tells.
_MOST_VALIDATION = 1_000_000


class PreparedTask(Task):
    """Prediction of every next token, by those of its own document alone.

    The last tenth of the tokens, a million at most, is for validation. A batch reads its own
    windows and nothing else. Where they stand is a function of the generator's state alone: that of
    a run is one of its seed and step.

    Args:
        text: the token files.
        context_length: tokens a window, T.

    Raises:
        DataError: a part is too short, as `TextDataset.from_text` says.
    """

    def __init__(self, text: PreparedText, context_length: int) -> None:
        self._text, self._context_length = text, context_length
        self._validation = min(text.tokens // 10, _MOST_VALIDATION)
        self._train = text.tokens - self._validation
        self.fingerprint = text.fingerprint
        self.extent = (
            f"{self._train:,} training and {self._validation:,} validation tokens of "
            f"{text.documents:,} documents"
        )
        if self._train < context_length + 1 or self._validation < 2:
            raise DataError(
                f"the prepared text is too short: it has {self._train} tokens for training and "
                f"{self._validation} for validation, but a context of {context_length} needs at "
                f"least {context_length + 1} and 2"
            )

    def draw(
        self, split: Split, batch_size: int, generator: torch.Generator, rows: slice | None = None
    ) -> Batch:
        """Windows of the split at random places; shorter ones if the split is shorter.

        Args:
            split, batch_size, generator: as for `Task.draw`.
            rows: which windows of the batch to read, default: all; the generator goes on as for
                all of them.
        """
        first, count = (0, self._train) if split == "train" else (self._train, self._validation)
        context = min(self._context_length, count - 1)
        starts = torch.randint(count - context, (batch_size,), generator=generator)
        if rows is None:
            return self._batch(first + starts, context)
        own = self._batch(first + starts[rows], context)
        return dataclasses.replace(own, whole_rows=batch_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Adjoining windows of the whole split, the same every time."""
        last, context = self._text.tokens - 1, self._context_length
        whole = (self._validation - 1) // context
        starts = self._train + context * torch.arange(whole)
        for part in torch.split(starts, batch_size):
            yield self._batch(part, context)
        left = self._train + context * whole
        if left < last:
            yield self._batch(torch.tensor([left]), last - left)

    def _batch(self, starts: Tensor, context: int) -> Batch:
        tokens, documents = self._text.windows(starts, context + 1)
        # What the next document begins with follows from nothing in this one.
        apart = documents[:, 1:] != documents[:, :-1]
        targets = tokens[:, 1:].masked_fill(apart, IGNORED)
        return Batch((tokens[:, :-1],), targets, documents=documents[:, :-1])
