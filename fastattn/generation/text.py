"""Encode prompts, and stream text up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ..checks import type_name


class TextDecoder(Protocol):
    """Interface of an incremental detokenizer."""

    def feed(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Tokenizer interface of text generation."""

    def encode(self, text: str, /) -> list[int]: ...

    def decoder(self) -> TextDecoder: ...


class TextStream:
    """Stream of text from tokens, up to a stop string.

    Text that may begin a stop string is held back until decided, so neither a stop string nor later
    text is returned. The stop string that is complete first ends the text, regardless of token
    boundaries.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        after: the preceding text, as word tokenizers begin a text without a space.

    Attributes:
        stopped: whether a stop string has occurred.

    Raises:
        TypeError: stop is a str, or holds something else.
        ValueError: a stop string is empty.
    """

    def __init__(self, tokenizer: TextCodec, stop: Collection[str] = (), after: str = "") -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop must be a sequence of str, got {stop!r}")
        self._stop = tuple(stop)
        if "" in self._stop:
            raise ValueError("stop must hold strings of at least one character, got ''")
        self._decoder = tokenizer.decoder()
        for token in tokenizer.encode(after):
            self._decoder.feed(token)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Add a token; return the text that is now certain, '' once stopped."""
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
        """Find where the stop string starts that is complete first, the longest of ties."""
        matches = [(text.find(stop), stop) for stop in self._stop]
        ends = [(begin + len(stop), begin) for begin, stop in matches if begin >= 0]
        return min(ends)[1] if ends else None

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        ends = range(min(longest, len(text)), 0, -1)
        return next((n for n in ends if any(x.startswith(text[-n:]) for x in self._stop)), 0)


def encode_prompt(tokenizer: TextCodec, prompt: str) -> list[int]:
    """Encode a prompt; an empty one is a line break, or token 0 if that is unknown."""
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a str, got {type_name(prompt)}")
    return tokenizer.encode(prompt) or _line_start(tokenizer)


def text_until_stop(
    tokenizer: TextCodec, tokens: Sequence[int], stop: Sequence[str], after: str = ""
) -> str:
    """Decode tokens that follow a text, up to the first stop string."""
    stream = TextStream(tokenizer, stop, after)
    return "".join([stream.feed(token) for token in tokens]) + stream.finish()


def _line_start(tokenizer: TextCodec) -> list[int]:
    try:
        return tokenizer.encode("\n") or [0]
    except ValueError:
        return [0]
