"""Interface of tokenizers, names of special tokens, and incremental decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from ...checks import check_int, type_name

Special = Literal["pad", "unknown", "begin", "end", "mask"]

# Names of each special token: first the one in new tokenizers here, then those of BERT, T5, BART
# and GPT-2, whose begin and end token are one.
SPECIAL_NAMES: dict[Special, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "begin": ("[BEGIN]", "[CLS]", "<s>", "<|endoftext|>"),
    "end": ("[END]", "[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}


class TokenizerError(ValueError):
    """Error: a tokenizer cannot be trained, read, or applied to a text."""


class Tokenizer(ABC):
    """Base of tokenizers; ids are 0 .. vocab_size - 1."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of distinct ids."""

    @abstractmethod
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode several texts, as `encode`."""

    @abstractmethod
    def text_of(self, tokens: Sequence[int]) -> str:
        """Decode ids that are in range, as `decode`."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the tokenizer as JSON, for `from_json`."""

    def encode(self, text: str) -> list[int]:
        """Encode a text, without special tokens.

        Raises:
            TokenizerError: the text holds an unknown character.
        """
        return self.encode_batch([text])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is not in 0 .. vocab_size - 1.
        """
        return self.text_of([self.check_id(token) for token in tokens])

    def decoder(self) -> TokenDecoder:
        """Make an incremental decoder."""
        return TokenDecoder(self)

    def find_id(self, token: str) -> int | None:
        """Find the id of a token, or None."""
        return None

    def special_id(self, special: Special) -> int:
        """Find the id of a special token, under any of the names in `SPECIAL_NAMES`.

        Raises:
            TokenizerError: the tokenizer has no such token.
        """
        for name in SPECIAL_NAMES[special]:
            if (token := self.find_id(name)) is not None:
                return token
        names = " or ".join(SPECIAL_NAMES[special])
        raise TokenizerError(f"the tokenizer has no {special} token, such as {names}")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        found = (self.find_id(name) for names in SPECIAL_NAMES.values() for name in names)
        return frozenset(token for token in found if token is not None)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def check_id(self, token: int) -> int:
        """Return an id as Python's int; TokenizerError unless 0 <= token < vocab_size."""
        token = check_int("a token id", token)
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"token ids must be in 0..{self.vocab_size - 1} for this tokenizer, got {token}"
            )
        return token


class TokenDecoder:
    """Incremental decoder: each character as soon as it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The ids that gave text last, which say how the next word is joined; ids since then.
        self._before: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """Return the characters that this id completes, possibly none."""
        self._held.append(self._tokenizer.check_id(token))
        text = self.finish()
        # U+FFFD may be the half of a character: more bytes will tell.
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, else ''."""
        shown = len(self._tokenizer.text_of(self._before))
        return self._tokenizer.text_of(self._before + self._held)[shown:]


def check_texts(texts: Iterable[str]) -> list[str]:
    """Return the texts as a list; TypeError for one text alone, or for something else."""
    if isinstance(texts, str):
        raise TypeError("texts must be several texts, got a str, which encode takes")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a text must be a str, got {type_name(text)}")
    return texts


def encodable(texts: Iterable[str]) -> list[str]:
    """Return the texts; TokenizerError for half of a character, which UTF-8 lacks."""
    texts = check_texts(texts)
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds {text[error.start]!r} at position {error.start}, which is half "
                "of a character and has no UTF-8 encoding"
            ) from None
    return texts
