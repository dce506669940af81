"""Text to token ids and back: one token a character, or byte-level BPE."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .extras import import_extra

_CHARACTER_FORMAT = "fastattn-characters"
# Long texts are encoded in pieces of about this many characters, cut behind a line break, because
# Hugging Face's encoder keeps some hundred bytes a token until a call returns.
_PIECE_CHARACTERS = 1 << 20


class TokenizerError(ValueError):
    """A tokenizer cannot be trained, read, or applied to a text."""


class TokenDecoder(ABC):
    """Turns ids into text one at a time, each character as soon as it is complete."""

    @abstractmethod
    def feed(self, token: int) -> str:
        """Returns the characters that this id completes, often one, possibly none."""

    @abstractmethod
    def finish(self) -> str:
        """Returns what is left: U+FFFD for a character that was never completed, else ''."""


class Tokenizer(ABC):
    """What training and generation need of a tokenizer; ids are 0 .. vocab_size - 1."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of distinct ids."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
            TokenizerError: the text holds a character that no id stands for.
        """

    @abstractmethod
    def decoder(self) -> TokenDecoder:
        """A decoder at the start of a text."""

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as a JSON text, which `from_json` reads back."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of some ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is not in 0 .. vocab_size - 1.
        """
        decoder = self.decoder()
        return "".join([decoder.feed(token) for token in tokens]) + decoder.finish()

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"token ids must be in 0..{self.vocab_size - 1} for this tokenizer, got {token}"
            )


class CharacterTokenizer(Tokenizer):
    """One id a character, numbered in the order of their code points.

    Args:
        characters: the characters to know, in any order; repetitions count once.

    Raises:
        TokenizerError: there is no character at all.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        if not self.characters:
            raise TokenizerError("a character tokenizer needs at least one character, got none")
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}) does not occur in the text that "
                f"the tokenizer was made from ({self.vocab_size} characters)"
            ) from None

    def decoder(self) -> TokenDecoder:
        return _CharacterDecoder(self)

    def to_json(self) -> str:
        return json.dumps({"format": _CHARACTER_FORMAT, "characters": "".join(self.characters)})


class _CharacterDecoder(TokenDecoder):
    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self._tokenizer = tokenizer

    def feed(self, token: int) -> str:
        self._tokenizer._check_id(token)
        return self._tokenizer.characters[token]

    def finish(self) -> str:
        return ""


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (as GPT-2's), by Hugging Face `tokenizers`.

    Every text can be encoded, because every single byte has an id.

    Args:
        backend: a `tokenizers.Tokenizer` whose decoder is byte-level.

    Raises:
        TokenizerError: the backend is of another kind.
    """

    def __init__(self, backend: Any) -> None:
        kind = type(backend.decoder).__name__
        if kind != "ByteLevel":
            raise TokenizerError(
                f"the tokenizer must have a ByteLevel decoder, as GPT-2's has, got {kind}"
            )
        self._backend = backend
        # Not the number of tokens: ids of a foreign tokenizer may have gaps.
        self._vocab_size = max(backend.get_vocab().values(), default=-1) + 1

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BPETokenizer:
        """Learns merges from a text until there are vocab_size ids.

        A short or repetitive text may offer fewer merges than asked for; `vocab_size` of the
        result tells.

        Raises:
            TokenizerError: vocab_size is under 256, the number of bytes.
            ModuleNotFoundError: `tokenizers` is not installed.
        """
        if vocab_size < 256:
            raise TokenizerError(
                f"vocab_size must be at least 256 for byte-level BPE, got {vocab_size}"
            )
        hf = _import_tokenizers()
        backend = hf.Tokenizer(hf.models.BPE())
        backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = hf.decoders.ByteLevel()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(_pieces(text), trainer)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds {text[error.start]!r} at position {error.start}, which is half "
                "of a character and has no UTF-8 encoding"
            ) from None
        encodings = self._backend.encode_batch(list(_pieces(text)), add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    def decoder(self) -> TokenDecoder:
        return _BPEDecoder(self)

    def to_json(self) -> str:
        return self._backend.to_str()

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes that each id stands for; ids without a token stand for none."""
        to_byte = _byte_of_printable()
        table = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=False).items():
            known = all(character in to_byte for character in token)
            table[i] = bytes(map(to_byte.__getitem__, token)) if known else token.encode("utf-8")
        # Special tokens are written as they are.
        for i, token in self._backend.get_added_tokens_decoder().items():
            table[i] = token.content.encode("utf-8")
        return table


class _BPEDecoder(TokenDecoder):
    def __init__(self, tokenizer: BPETokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        self._tokenizer._check_id(token)
        return self._utf8.decode(self._tokenizer.token_bytes[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def train_tokenizer(kind: str, text: str, *, vocab_size: int = 1024) -> Tokenizer:
    """Makes a tokenizer from a text.

    Args:
        kind: "char" or "bpe".
        text: what to learn from.
        vocab_size: ids to aim at, for "bpe"; "char" has as many as the text has characters.

    Raises:
        TokenizerError: kind is unknown, or as the classes say.
    """
    if kind == "char":
        return CharacterTokenizer(text)
    if kind == "bpe":
        return BPETokenizer.train(text, vocab_size)
    raise TokenizerError(f"tokenizer must be 'char' or 'bpe', got {kind!r}")


def from_json(text: str, *, source: str = "the tokenizer") -> Tokenizer:
    """Reads `Tokenizer.to_json`, or the JSON of any Hugging Face tokenizer that is byte-level.

    Args:
        text: the JSON.
        source: what messages call it, such as the file's name.

    Raises:
        TokenizerError: the text is no such JSON.
        ModuleNotFoundError: it is a BPE tokenizer and `tokenizers` is not installed.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{source} is not JSON: {error}") from None
    if isinstance(fields, dict) and fields.get("format") == _CHARACTER_FORMAT:
        characters = fields.get("characters")
        if not isinstance(characters, str):
            raise TokenizerError(f"{source} has no text under 'characters'")
        return CharacterTokenizer(characters)
    if not isinstance(fields, dict) or "model" not in fields:
        raise TokenizerError(f"{source} is neither a character tokenizer nor a Hugging Face one")
    hf = _import_tokenizers()
    try:
        backend = hf.Tokenizer.from_str(text)
    # The Rust side raises plain Exception for anything that it cannot read.
    except Exception as error:
        raise TokenizerError(
            f"{source} cannot be read by Hugging Face tokenizers: {error}"
        ) from None
    return BPETokenizer(backend)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer's JSON file; see `from_json`.

    Raises:
        TokenizerError: the file is missing, unreadable or no tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read tokenizer {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenizerError(f"tokenizer {path} is not UTF-8 text") from None
    return from_json(text, source=f"tokenizer {path}")


def byte_level_bpe(vocabulary: str | Path, merges: str | Path) -> BPETokenizer:
    """Reads the two files of older byte-level tokenizers, GPT-2's vocab.json and merges.txt.

    <|endoftext|> is a special token where the vocabulary has it.

    Raises:
        TokenizerError: a file is missing, or they are no such tokenizer.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    hf = _import_tokenizers()
    try:
        backend = hf.Tokenizer(hf.models.BPE.from_file(str(vocabulary), str(merges)))
    # The Rust side raises plain Exception for anything that it cannot read.
    except Exception as error:
        raise TokenizerError(f"cannot read tokenizer {vocabulary}, {merges}: {error}") from None
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    if backend.token_to_id("<|endoftext|>") is not None:
        backend.add_special_tokens(["<|endoftext|>"])
    return BPETokenizer(backend)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of about _PIECE_CHARACTERS, cut behind line breaks where there are any."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = end if line_end < 0 else line_end + 1
        yield text[start:end]
        start = end


def _byte_of_printable() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back.

    Printable Latin-1 characters stand for their own byte, and the other bytes in rising order for
    the characters from U+0100 on (GPT-2's encoder.py, bytes_to_unicode).
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    table = {chr(byte): byte for byte in own}
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table


def _import_tokenizers() -> Any:
    hf = import_extra("tokenizers", "byte-level BPE")
    for name in ("decoders", "models", "pre_tokenizers", "trainers"):
        import_extra(f"tokenizers.{name}", "byte-level BPE")
    return hf
