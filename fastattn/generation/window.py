"""The context of a batch of texts: a model's caches, and what follows when they are full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from torch import Tensor

from ..models.gpt import GPT
from ..models.sampling import check_finite
from ..models.transfer import to_device

# What follows a full context; see `Reading`.
PastContext = Literal["restart", "crop"]


class Reading:
    """Which tokens of a text a model holds, as the text grows.

    They grow to context_length tokens. The next token starts a new window: what is held is
    forgotten, and the end of the text, that token included, is read anew, so that a text goes on
    without end: the last half of a context ("restart"), after which a cache serves again, and the
    model sees between half and all of its context; or the last context_length tokens ("crop"), as
    nanoGPT's `idx[:, -block_size:]`, which computes all of them in every further step. Of a first
    piece longer than the context its last context_length tokens are read. With a context of six, a
    prompt of four and then token after token, the model holds

        restart:  abcd  abcde  abcdef  efg     efgh    efghi   efghij  ijk  ...
        crop:     abcd  abcde  abcdef  bcdefg  cdefgh  defghi  ...

    Args:
        context: the model's context_length.
        past_context: "restart" or "crop".

    Raises:
        ValueError: past_context is neither.

    Attributes:
        held: how many tokens the model holds; they are the last of the text.
    """

    def __init__(self, context: int, past_context: PastContext = "restart") -> None:
        check_past_context(past_context)
        self.held = 0
        self._context, self._past_context = context, past_context
        self._recent = deque[int](maxlen=context)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are held."""
        return list(self._recent)[len(self._recent) - self.held :]

    def enter(self, piece: Iterable[int]) -> tuple[list[int], bool]:
        """The text's next tokens: what is to be read for them, and whether all else is forgotten.

        It counts as held from here on.
        """
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
        """Forgets the text's last tokens; at most all that is known of it."""
        self.held -= min(count, self.held)
        for _ in range(min(count, len(self._recent))):
            self._recent.pop()

    def copy(self) -> Reading:
        """One that goes on by itself."""
        twin = Reading(self._context, self._past_context)
        twin.held, twin._recent = self.held, self._recent.copy()
        return twin


def check_past_context(past_context: str) -> None:
    """Raises ValueError on what `Reading` does not know."""
    if past_context not in get_args(PastContext):
        known = " or ".join(map(repr, get_args(PastContext)))
        raise ValueError(f"past_context must be {known}, got {past_context!r}")


class Window:
    """A batch of texts in a model's key/value caches, each held as `Reading` says.

    Args:
        model: in evaluation mode.
        batch_size: rows B.
        max_tokens: the most tokens that any row's text will have, if known: no more room than that
            is set aside.
        past_context: as for `Reading`.

    Attributes:
        caches: one a layer.
        device: of the model.
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
        """How many tokens each row holds."""
        return [reading.held for reading in self._readings]

    def room(self, row: int) -> int:
        """How many tokens a row can read before it starts a new window."""
        return self.context - self._readings[row].held

    def read(
        self, tokens: Sequence[Sequence[int]], *, last_only: bool = True, check: bool = True
    ) -> Tensor:
        """Reads each row's next tokens and scores what follows.

        Args:
            tokens: B pieces; a row with an empty one stays as it is.
            last_only: score what follows each piece, not what follows each token.
            check: whether the scores are finite, for which the host waits for the device; False:
                as `choose_rows` finds out.

        Returns:
            logits [B, V], or [B, T, V] with T the longest piece read; those of an empty piece, and
            those behind a shorter one's end, are unspecified.

        Raises:
            FloatingPointError: the scores are not finite.
        """
        entered = [r.enter(piece) for r, piece in zip(self._readings, tokens, strict=True)]
        pieces = [piece for piece, _ in entered]
        forgotten = [forgotten for _, forgotten in entered]
        if any(forgotten):
            held = self.held
            self._truncate([0 if gone else n for n, gone in zip(held, forgotten, strict=True)])
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        logits = self.forward(to_device(padded, self.device), lengths, last_only)
        if check:
            check_finite(logits[[row for row, length in enumerate(lengths) if length]])
        return logits[:, -1] if last_only else logits

    def forward(self, tokens: Tensor, lengths: Sequence[int], last_only: bool) -> Tensor:
        """The model on tokens [B, T], of which the first lengths[b] of row b count."""
        held = max(held - length for held, length in zip(self.held, lengths, strict=True))
        for cache in self.caches:
            # A cache's own bound grows by the pads too, until it has to ask the device.
            cache.length_bound = held
        ragged = min(lengths) < tokens.shape[1]
        key_lengths = to_device(lengths, self.device) if ragged else None
        return self.model(tokens, cache=self.caches, key_lengths=key_lengths, last_only=last_only)

    def take_back(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[b] tokens that row b has read; at most all that it holds."""
        for reading, count in zip(self._readings, counts, strict=True):
            reading.take_back(count)
        self._truncate(self.held)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row b what row rows[b] was."""
        if list(rows) == list(range(len(rows))):
            return
        index = to_device(list(rows), self.device)
        for cache in self.caches:
            cache.reorder(index)
        self._readings = [self._readings[row].copy() for row in rows]

    def _truncate(self, lengths: list[int]) -> None:
        """Cuts each row of the caches down to a length."""
        if len(set(lengths)) == 1:
            for cache in self.caches:
                cache.truncate(lengths[0])
            return
        on_device = to_device(lengths, self.device)
        for cache in self.caches:
            cache.truncate(on_device)
