"""The context window of a batch of texts: a model's caches, and restarts when they are full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Literal, get_args

from torch import Tensor

from ..models.gpt import GPT
from ..models.sampling import check_finite
from ..models.stack import evaluating
from ..models.transfer import to_device

# Behaviour at a full context; see `Reading`.
PastContext = Literal["restart", "crop"]


class Reading:
    """The tokens of a growing text that a model holds.

    At a full context, the next token starts a new window: the end of the text, that token included,
    is read again. "restart": the last half of a context, so that the cache serves later steps, and
    the model sees between half and all of its context. "crop": the last context_length tokens, as
    nanoGPT's `idx[:, -block_size:]`, which are recomputed in every later step. Of a first piece
    longer than the context the last context_length tokens are read. With a context of six, a prompt
    of four and then token after token, the model holds

        restart:  abcd  abcde  abcdef  efg     efgh    efghi   efghij  ijk  ...
        crop:     abcd  abcde  abcdef  bcdefg  cdefgh  defghi  ...

    Args:
        context: the model's context_length.
        past_context: "restart" or "crop".

    Raises:
        ValueError: past_context is neither.

    Attributes:
        held: number of held tokens, the last of the text.
    """

    def __init__(self, context: int, past_context: PastContext = "restart") -> None:
        check_past_context(past_context)
        self.held = 0
        self._context, self._past_context = context, past_context
        self._recent = deque[int](maxlen=context)

    @property
    def tokens(self) -> list[int]:
        """The held tokens."""
        return list(self._recent)[len(self._recent) - self.held :]

    def enter(self, piece: Iterable[int]) -> tuple[list[int], bool]:
        """Add the text's next tokens: return the tokens to read, and whether the cache is reset."""
        piece = list(piece)
        self._recent.extend(piece)
        if self.held + len(piece) <= self._context:
            self.held += len(piece)
            return piece, False
        restarts = self.held > 0 and self._past_context == "restart"
        kept = max(1, self._context // 2) if restarts else self._context
        forgotten, piece = self.held > 0, list(self._recent)[-kept:]
        self.held = len(piece)
        return piece, forgotten

    def take_back(self, count: int) -> None:
        """Drop the text's last tokens, at most all."""
        self.held -= min(count, self.held)
        for _ in range(min(count, len(self._recent))):
            self._recent.pop()


def check_past_context(past_context: str) -> None:
    """Raise ValueError unless past_context is valid."""
    if past_context not in get_args(PastContext):
        choices = " or ".join(map(repr, get_args(PastContext)))
        raise ValueError(f"past_context must be {choices}, got {past_context!r}")


class Window:
    """A batch of texts in a model's key/value caches, each with a `Reading`.

    max_tokens: the most tokens of any row's text, if known, which bounds the caches.
    """

    def __init__(
        self,
        model: GPT,
        batch_size: int,
        max_tokens: int | None = None,
        past_context: PastContext = "restart",
    ) -> None:
        self.model = model
        self.context = model.config.context_length
        slots = self.context if max_tokens is None else max(1, min(max_tokens, self.context))
        self.caches = model.new_cache(batch_size, slots)
        self._readings = [Reading(self.context, past_context) for _ in range(batch_size)]
        self.device = next(model.parameters()).device

    @property
    def held(self) -> list[int]:
        """Number of tokens of each row."""
        return [reading.held for reading in self._readings]

    def room(self, row: int) -> int:
        """Number of tokens that a row can read before it starts a new window."""
        return self.context - self._readings[row].held

    def read(
        self, tokens: Sequence[Sequence[int]], *, last_only: bool = True, check: bool = True
    ) -> Tensor:
        """Read each row's next tokens, and score the following ones.

        Args:
            tokens: B pieces; a row with an empty one is unchanged.
            last_only: return scores only after each piece, not after each token.
            check: check that the scores are finite, which waits for the device; False:
                `choose_rows` checks.

        Returns:
            logits [B, V], or [B, T, V] with T the longest piece read; unspecified for empty pieces
            and past the end of shorter ones.

        Raises:
            FloatingPointError: the scores are not finite.
        """
        entered = [r.enter(piece) for r, piece in zip(self._readings, tokens, strict=True)]
        pieces = [piece for piece, _ in entered]
        if any(forgotten for _, forgotten in entered):
            both = zip(self.held, entered, strict=True)
            self._truncate([0 if forgotten else held for held, (_, forgotten) in both])
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        with evaluating(self.model):
            logits = self.forward(to_device(padded, self.device), lengths, last_only)
        if check:
            check_finite(logits[[row for row, length in enumerate(lengths) if length]])
        return logits[:, -1] if last_only else logits

    def forward(self, tokens: Tensor, lengths: Sequence[int], last_only: bool) -> Tensor:
        """Run the model on tokens [B, T]; row b has lengths[b] tokens."""
        held = max(held - length for held, length in zip(self.held, lengths, strict=True))
        for cache in self.caches:
            # A cache's own bound includes padding, until it reads the device.
            cache.length_bound = held
        ragged = min(lengths) < tokens.shape[1]
        key_lengths = to_device(lengths, self.device) if ragged else None
        how = {"cache": self.caches, "key_lengths": key_lengths, "last_only": last_only}
        return self.model(tokens, **how)[0]

    def take_back(self, counts: Sequence[int]) -> None:
        """Drop the last counts[b] tokens of row b, at most all."""
        for reading, count in zip(self._readings, counts, strict=True):
            reading.take_back(count)
        self._truncate(self.held)

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row b the former row rows[b]."""
        if list(rows) == list(range(len(rows))):
            return
        index = to_device(list(rows), self.device)
        for cache in self.caches:
            cache.reorder(index)
        self._readings = [deepcopy(self._readings[row]) for row in rows]

    def _truncate(self, lengths: list[int]) -> None:
        """Cuts each row of the caches down to a length."""
        alike = len(set(lengths)) == 1
        length = lengths[0] if alike else to_device(lengths, self.device)
        for cache in self.caches:
            cache.truncate(length)
