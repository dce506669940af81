"""Prompts to tokens, and streamed text that ends at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Turns ids into text one at a time."""

    def feed(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Interface that text generation needs from a tokenizer."""

    def encode(self, text: str, /) -> list[int]: ...

    def decoder(self) -> TextDecoder: ...


class TextStream:
    """The text of tokens as it is completed, up to a stop string and without it.

    Text that may turn out to be the beginning of a stop string is held back until it is decided, so
    neither a stop string nor anything behind it ever comes out. Of several stop strings the one
    that is complete first ends the text, whatever the borders of tokens.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        after: the text that comes before: tokenizers of words begin a text without a space.

    Attributes:
        stopped: whether a stop string has occurred.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, tokenizer: TextCodec, stop: Iterable[str] = (), after: str = "") -> None:
        self._stop = tuple(stop)
        if "" in self._stop:
            raise ValueError("stop must hold strings of at least one character, got ''")
        self._decoder = tokenizer.decoder()
        for token in tokenizer.encode(after):
            self._decoder.feed(token)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after one more token, often its own; '' once stopped."""
        return "" if self.stopped else self._release(self._decoder.feed(token))

    def finish(self) -> str:
        """Return the text held back, after the last token; '' if stopped."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.finish())
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        end = self._first_stop(text)
        if end is not None:
            self.stopped, self._held = True, ""
            return text[:end]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first, the longest of those."""
        matches = [(text.find(stop), stop) for stop in self._stop]
        ends = [(begin + len(stop), begin) for begin, stop in matches if begin >= 0]
        return min(ends)[1] if ends else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def encode_prompt(tokenizer: TextCodec, prompt: str) -> list[int]:
    """Tokens of a prompt; of an empty one those of a line break, or token 0 if that is unknown.

    Raises:
        ValueError: the tokenizer does not know a character of the prompt.
    """
    return tokenizer.encode(prompt) or _line_start(tokenizer)


def text_until_stop(
    tokenizer: TextCodec, tokens: Sequence[int], stop: Sequence[str], after: str = ""
) -> str:
    """The whole text of tokens behind another text, up to the first stop string."""
    stream = TextStream(tokenizer, stop, after)
    return "".join([stream.feed(token) for token in tokens]) + stream.finish()


def _line_start(tokenizer: TextCodec) -> list[int]:
    try:
        return tokenizer.encode("\n") or [0]
    except ValueError:
        return [0]
