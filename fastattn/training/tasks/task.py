"""The interface of a training task, and next-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..data.rows import IGNORED
from ..data.text import TextDataset, evaluation_batches, random_batch

_VALIDATION_SEED = 0

Split = Literal["train", "validation"]
_Row = TypeVar("_Row")


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


class RowsTask(Task, Generic[_Row]):
    """A task whose batches are made of rows, each as likely as any other.

    Args:
        train, validation: not empty.
    """

    def __init__(self, train: Sequence[_Row], validation: Sequence[_Row]) -> None:
        self.rows: Mapping[Split, Sequence[_Row]] = {"train": train, "validation": validation}

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        rows = self.rows[split]
        chosen = torch.randint(len(rows), (batch_size,), generator=generator)
        return self.batch([rows[i] for i in chosen.tolist()])

    def validation(self, batch_size: int) -> Iterator[Batch]:
        rows = self.rows["validation"]
        for i in range(0, len(rows), batch_size):
            yield self.batch(rows[i : i + batch_size])

    def batch(self, rows: Sequence[_Row]) -> Batch:
        """Make a batch of some rows."""
        raise NotImplementedError


class LanguageTask(Task):
    """Prediction of every next token of a text.

    Args:
        dataset: the text.
        context_length: tokens a window, T.
    """

    def __init__(self, dataset: TextDataset, context_length: int) -> None:
        self._dataset, self._context_length = dataset, context_length
        self.fingerprint = dataset.fingerprint
        train, validation = len(dataset.train), len(dataset.validation)
        self.extent = f"{train:,} training and {validation:,} validation tokens"

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        """Windows of the split at random places; shorter ones if the split is shorter."""
        tokens: Tensor = getattr(self._dataset, split)
        context = min(self._context_length, len(tokens) - 1)
        windows = random_batch(tokens, batch_size, context, generator)
        return self._batch(*windows, generator)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Adjoining windows of the whole split, the same every time."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        tokens = self._dataset.validation
        for windows in evaluation_batches(tokens, batch_size, self._context_length):
            yield self._batch(*windows, generator)

    def _batch(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        """Make a batch from windows and the same windows one token further on."""
        return Batch((inputs,), targets)
