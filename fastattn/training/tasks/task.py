"""Interface of a training task, and next-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ...models.fields import check_type
from ...models.transfer import to_device
from ..data.rows import IGNORED
from ..data.text import TextDataset, check_counts

if TYPE_CHECKING:
    from ..data.prepared import PreparedText

_VALIDATION_SEED = 0

Split = Literal["train", "validation"]
_Example = TypeVar("_Example")


@dataclass(frozen=True)
class Batch:
    """Arguments of a model: `model(*inputs, targets, **keywords)` returns (logits, loss).

    Args:
        inputs: int64, each [B, T] with its own T.
        targets: int64 [B, T], -100 at positions without a target.
        lengths: int64 [B] by keyword, for padded inputs.
        documents: int32 or int64 [B, T], of packed texts; None = a row is one text.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    lengths: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    documents: Tensor | None = None

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Keyword arguments of the model other than inputs and targets."""
        packed = {} if self.documents is None else {"documents": self.documents}
        return {**self.lengths, **packed}

    @cached_property
    def num_targets(self) -> int:
        """Positions with a target."""
        return int((self.targets != IGNORED).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        if self.lengths:
            return sum(int(lengths.sum()) for lengths in self.lengths.values())
        return sum(tokens.numel() for tokens in self.inputs)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device."""

        def move(part: Tensor) -> Tensor:
            return to_device(part.contiguous(), device)

        return Batch(
            tuple(map(move, self.inputs)),
            move(self.targets),
            {name: move(lengths) for name, lengths in self.lengths.items()},
            None if self.documents is None else move(self.documents),
        )


class Task:
    """Task and its data.

    Attributes:
        fingerprint: SHA-256 of all data, in hexadecimal.
        extent: amount of data, for messages: "90 training and 10 validation pairs".
    """

    fingerprint: str
    extent: str

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw a random batch; the generator is the only source of randomness."""
        raise NotImplementedError

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Yield the whole validation split, the same batches every time."""
        raise NotImplementedError

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Compute validation scores besides the loss, JSON values by name; none here.

        The model is in evaluation mode, and gradients are off.
        """
        return {}


class ExampleTask(Task, Generic[_Example]):
    """Task whose batches are uniform samples of examples.

    Args:
        train, validation: not empty.
    """

    def __init__(self, train: Sequence[_Example], validation: Sequence[_Example]) -> None:
        self.rows: Mapping[Split, Sequence[_Example]] = {"train": train, "validation": validation}

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        check_type("split", split, Split)
        rows = self.rows[split]
        chosen = torch.randint(len(rows), (batch_size,), generator=generator, device="cpu")
        return self.batch([rows[i] for i in chosen.tolist()])

    def validation(self, batch_size: int) -> Iterator[Batch]:
        rows = self.rows["validation"]
        for i in range(0, len(rows), batch_size):
            yield self.batch(rows[i : i + batch_size])

    def batch(self, rows: Sequence[_Example]) -> Batch:
        """Make a batch of these examples."""
        raise NotImplementedError


class LanguageTask(Task):
    """Next-token prediction within documents.

    A batch reads only its own windows of context_length tokens. Their positions depend only on the
    generator's state, and so on a run's seed and step.

    Raises:
        DataError: a part is too short, as `TextDataset.from_text` says.
    """

    def __init__(self, text: TextDataset | PreparedText, context_length: int) -> None:
        self._text, self._context_length = text, context_length
        self.fingerprint = text.fingerprint
        self._train, self._validation = text.counts
        check_counts(*text.counts, context_length)
        self.extent = f"{self._train:,} training and {self._validation:,} validation tokens"
        if documents := getattr(text, "documents", None):
            self.extent += f" of {documents:,} documents"

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw windows at random positions of the split, shorter ones if the split is shorter."""
        check_type("split", split, Split)
        first, count = (0, self._train) if split == "train" else (self._train, self._validation)
        context = min(self._context_length, count - 1)
        starts = first + torch.randint(
            count - context, (batch_size,), generator=generator, device="cpu"
        )
        return self._windows(starts, context, generator)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Yield consecutive windows of the whole split, the same every time."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        last, context = self._train + self._validation - 1, self._context_length
        left = last - (last - self._train) % context
        starts = torch.arange(self._train, left, context, device="cpu")
        for i in range(0, len(starts), batch_size):
            yield self._windows(starts[i : i + batch_size], context, generator)
        if left < last:
            yield self._windows(torch.tensor([left], device="cpu"), last - left, generator)

    def _windows(self, starts: Tensor, context: int, generator: torch.Generator) -> Batch:
        tokens, documents = self._text.windows(starts, context + 1)
        targets = tokens[:, 1:]
        if documents is not None:
            # No target at a document's end: the next one's beginning is unpredictable.
            targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED)
            documents = documents[:, :-1]
        return self._batch(Batch((tokens[:, :-1],), targets, documents=documents), generator)

    def _batch(self, windows: Batch, generator: torch.Generator) -> Batch:
        """Make a batch whose targets are the windows shifted by one token."""
        return windows
