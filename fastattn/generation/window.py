"""Context window of a batch of texts: a model's KV caches, restarted when full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..models.fields import check_type
from ..models.gpt import GPT
from ..models.sampling import check_finite
from ..models.stack import evaluating
from ..models.transfer import to_device

# Behaviour at a full context; see `Window`.
PastContext = Literal["restart", "crop"]


class Window:
    """KV caches of a batch of growing texts.

    At a full context, a row's next token starts a new window: the end of the text, that token
    included, is read again. "restart": the last half of a context, so that the cache serves later
    steps, and the model sees between half and all of its context. "crop": the last context_length
    tokens, as nanoGPT's `idx[:, -block_size:]`, which are recomputed in every later step. Of a
    first piece longer than the context the last context_length tokens are read. With a context of
    six, a prompt of four and then token after token, a row holds

        restart:  abcd  abcde  abcdef  efg     efgh    efghi   efghij  ijk  ...
        crop:     abcd  abcde  abcdef  bcdefg  cdefgh  defghi  ...

    Args:
        model: run in evaluation mode.
        batch_size: rows.
        max_tokens: the most tokens of any row's text, if known, which bounds the caches.
        past_context: "restart" or "crop".

    Raises:
        ValueError: past_context is neither.

    Attributes:
        held: number of tokens in each row's window, the last of its text.
    """

    def __init__(
        self,
        model: GPT,
        batch_size: int,
        max_tokens: int | None = None,
        past_context: PastContext = "restart",
    ) -> None:
        check_type("past_context", past_context, PastContext)
        self.model, self.context = model, model.config.context_length
        slots = self.context if max_tokens is None else max(1, min(max_tokens, self.context))
        self.caches = model.new_cache(batch_size, slots)
        self.device = next(model.parameters()).device
        self.held = [0] * batch_size
        self._texts: list[list[int]] = [[] for _ in self.held]  # the last context_length tokens
        self._restarts = past_context == "restart"

    def read(self, tokens: Sequence[Sequence[int]], *, check: bool = True) -> Tensor:
        """Read each row's next tokens, and score the following one.

        Args:
            tokens: B pieces; a row with an empty one is unchanged.
            check: check that the scores are finite, which waits for the device; False:
                `choose_rows` checks.

        Returns:
            logits [B, V]; unspecified for empty pieces.

        Raises:
            FloatingPointError: the scores are not finite.
        """
        before = list(self.held)
        pieces = [self._enter(row, list(piece)) for row, piece in enumerate(tokens)]
        kept = [held - len(piece) for held, piece in zip(self.held, pieces, strict=True)]
        if kept != before:
            self._truncate(kept)
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        with evaluating(self.model):
            logits = self.forward(to_device(padded, self.device), lengths)
        if check:
            check_finite(logits[[row for row, length in enumerate(lengths) if length]])
        return logits[:, -1]

    def _enter(self, row: int, piece: list[int]) -> list[int]:
        """Add a row's next tokens; return those to read, all of its window if that is a new one."""
        held, context = self.held[row], self.context
        self._texts[row] = (self._texts[row] + piece)[-context:]
        self.held[row] = held + len(piece)
        if self.held[row] <= context:
            return piece
        self.held[row] = max(1, context // 2) if held and self._restarts else context
        return self._texts[row][-self.held[row] :]

    def forward(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run the model on tokens [B, T], of which row b has lengths[b]; logits [B, 1, V]."""
        held = max(held - length for held, length in zip(self.held, lengths, strict=True))
        for cache in self.caches:
            # A cache's own bound includes padding, until it reads the device.
            cache.length_bound = held
        ragged = min(lengths) < tokens.shape[1]
        key_lengths = to_device(lengths, self.device) if ragged else None
        return self.model(tokens, cache=self.caches, key_lengths=key_lengths, last_only=True)[0]

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row b the former row rows[b]."""
        if list(rows) == list(range(len(rows))):
            return
        index = to_device(list(rows), self.device)
        for cache in self.caches:
            cache.reorder(index)
        self._texts = [self._texts[row] for row in rows]
        self.held = [self.held[row] for row in rows]

    def _truncate(self, lengths: list[int]) -> None:
        """Cut each row of the caches down to a length."""
        alike = len(set(lengths)) == 1
        length = lengths[0] if alike else to_device(lengths, self.device)
        for cache in self.caches:
            cache.truncate(length)
