"""The interface of a training task, and next-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..data.prepared import PreparedText
from ..data.rows import IGNORED
from ..data.text import TextDataset, check_counts

_VALIDATION_SEED = 0

Split = Literal["train", "validation"]
_Example = TypeVar("_Row")


@dataclass(frozen=True)
class Batch:
    """One call of a model: `model(*inputs, targets, **keywords)` gives (logits, loss).

    Args:
        inputs: the model's inputs in their order, int64, each [B, T] of its own T.
        targets: int64 [B, T], -100 where the loss leaves a position out.
        lengths: int64 [B] by the model's keyword, for padded inputs.
        documents: int32 or int64 [B, T], of packed texts; None = a row is one text.
        whole_rows: of how many rows these are some, of as many tokens each; None = they are all.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    lengths: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    documents: Tensor | None = None
    whole_rows: int | None = None

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Keyword arguments of the model beside inputs and targets."""
        packed = {} if self.documents is None else {"documents": self.documents}
        return {**self.lengths, **packed}

    @property
    def num_targets(self) -> int:
        """Positions that the loss is the mean of."""
        return int((self.targets != IGNORED).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens without padding; of all rows, where these are some."""
        if self.lengths:
            return sum(int(lengths.sum()) for lengths in self.lengths.values())
        rows = self.whole_rows or len(self.targets)
        return sum(rows * tokens[0].numel() for tokens in self.inputs)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cpu":
            return self

        # From pinned memory the copy runs beside the previous step instead of waiting for it.
        def move(part: Tensor) -> Tensor:
            return part.contiguous().pin_memory().to(device, non_blocking=True)

        return Batch(
            tuple(map(move, self.inputs)),
            move(self.targets),
            {name: move(lengths) for name, lengths in self.lengths.items()},
            None if self.documents is None else move(self.documents),
            self.whole_rows,
        )


class Task:
    """Task to learn, with its data.

    Attributes:
        fingerprint: SHA-256 of all data, in hexadecimal.
        extent: how much data there is, for people: "90 training and 10 validation pairs".
    """

    fingerprint: str
    extent: str

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        """A random batch; the generator is the only source of randomness."""
        raise NotImplementedError

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """The whole validation split, the same batches every time."""
        raise NotImplementedError

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Figures beyond the loss over the validation split, JSON values by name; none here.

        The model is in evaluation mode, and gradients are off.
        """
        return {}


class ExampleTask(Task, Generic[_Example]):
    """A task whose batches are made of rows, each as likely as any other.

    Args:
        train, validation: not empty.
    """

    def __init__(self, train: Sequence[_Example], validation: Sequence[_Example]) -> None:
        self.rows: Mapping[Split, Sequence[_Example]] = {"train": train, "validation": validation}

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        rows = self.rows[split]
        chosen = torch.randint(len(rows), (batch_size,), generator=generator)
        return self.batch([rows[i] for i in chosen.tolist()])

    def validation(self, batch_size: int) -> Iterator[Batch]:
        rows = self.rows["validation"]
        for i in range(0, len(rows), batch_size):
            yield self.batch(rows[i : i + batch_size])

    def batch(self, rows: Sequence[_Example]) -> Batch:
        """Make a batch of some rows."""
        raise NotImplementedError


class LanguageTask(Task):
    """Prediction of every next token of a text, by those of its own document alone.

    A batch reads its own windows and nothing else. Where they stand is a function of the
    generator's state alone: that of a run is one of its seed and step.

    Args:
        text: the text's tokens, in memory or in files.
        context_length: tokens a window, T.

    Attributes:
        by_rows: whether a rank should read its own rows alone.

    Raises:
        DataError: a part is too short, as `TextDataset.from_text` says.
    """

    def __init__(self, text: TextDataset | PreparedText, context_length: int) -> None:
        self._text, self._context_length = text, context_length
        self.by_rows = isinstance(text, PreparedText)
        self.fingerprint = text.fingerprint
        self._train, self._validation = text.counts
        check_counts(*text.counts, context_length)
        self.extent = f"{self._train:,} training and {self._validation:,} validation tokens"
        if isinstance(text, PreparedText):
            self.extent += f" of {text.documents:,} documents"

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
        starts = first + torch.randint(count - context, (batch_size,), generator=generator)
        if rows is None:
            return self._windows(starts, context, generator)
        own = self._windows(starts[rows], context, generator)
        return dataclasses.replace(own, whole_rows=batch_size)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Adjoining windows of the whole split, the same every time."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        last, context = self._train + self._validation - 1, self._context_length
        left = last - (last - self._train) % context
        starts = torch.arange(self._train, left, context)
        for i in range(0, len(starts), batch_size):
            yield self._windows(starts[i : i + batch_size], context, generator)
        if left < last:
            yield self._windows(torch.tensor([left]), last - left, generator)

    def _windows(self, starts: Tensor, context: int, generator: torch.Generator) -> Batch:
        tokens, documents = self._text.windows(starts, context + 1)
        targets = tokens[:, 1:]
        if documents is not None:
            # The beginning of the next document follows from nothing in this one.
            targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED)
            documents = documents[:, :-1]
        return self._batch(Batch((tokens[:, :-1],), targets, documents=documents), generator)

    def _batch(self, windows: Batch, generator: torch.Generator) -> Batch:
        """Make a batch from windows whose targets are the same windows one token further on."""
        return windows
