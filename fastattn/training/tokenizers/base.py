"""The interface of tokenizers, and the names of special tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

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
    """A tokenizer cannot be trained, read, or applied to a text."""


class TokenDecoder(ABC):
    """Turns ids into text one at a time, each character as soon as it is complete."""

    @abstractmethod
    def feed(self, token: int) -> str:
        """Return the characters that this id completes, possibly none."""

    @abstractmethod
    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, else ''."""


class Tokenizer(ABC):
    """Base of tokenizers for training and generation; ids are 0 .. vocab_size - 1."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of distinct ids."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens not added.

        Raises:
            TokenizerError: the text holds an unknown character.
        """

    @abstractmethod
    def decoder(self) -> TokenDecoder:
        """A new decoder."""

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as JSON, for `from_json`."""

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is not in 0 .. vocab_size - 1.
        """
        decoder = self.decoder()
        return "".join([decoder.feed(token) for token in tokens]) + decoder.finish()

    def find_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        return None

    def special_id(self, special: Special) -> int:
        """The id of a special token, under any of the names in `SPECIAL_NAMES`.

        Raises:
            TokenizerError: the tokenizer has no such token.
        """
        token = self._find_special(special)
        if token is None:
            names = " or ".join(SPECIAL_NAMES[special])
            raise TokenizerError(f"the tokenizer has no {special} token, such as {names}")
        return token

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens of the vocabulary."""
        tokens = (self._find_special(special) for special in SPECIAL_NAMES)
        return frozenset(token for token in tokens if token is not None)

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _find_special(self, special: Special) -> int | None:
        tokens = (self.find_id(name) for name in SPECIAL_NAMES[special])
        return next((token for token in tokens if token is not None), None)

    def check_id(self, token: int) -> None:
        """Raise TokenizerError unless 0 <= token < vocab_size."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"token ids must be in 0..{self.vocab_size - 1} for this tokenizer, got {token}"
            )
