"""Byte-level byte-pair encoding, as in GPT-2."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .backend import BackendTokenizer, import_tokenizers, pieces
from .base import SPECIAL_NAMES, TokenDecoder, TokenizerError


class BPETokenizer(BackendTokenizer):
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
        super().__init__(backend)

    @classmethod
    def train(cls, text: str, vocab_size: int, *, special: bool = False) -> BPETokenizer:
        """Learns merges from a text until there are vocab_size ids.

        A short or repetitive text may yield fewer ids.

        Args:
            text: training text.
            vocab_size: target number of ids, special tokens included.
            special: begin the vocabulary with the special tokens of `SPECIAL_NAMES`, except the
                unknown token, as every byte is known.

        Raises:
            TokenizerError: vocab_size is under 256, the number of bytes.
            ModuleNotFoundError: `tokenizers` is not installed.
        """
        names = [x[0] for name, x in SPECIAL_NAMES.items() if name != "unknown"] if special else []
        least = 256 + len(names)
        if vocab_size < least:
            of = " with special tokens" if special else ""
            raise TokenizerError(
                f"vocab_size must be at least {least} for byte-level BPE{of}, got {vocab_size}"
            )
        hf = import_tokenizers()
        backend = hf.Tokenizer(hf.models.BPE())
        backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = hf.decoders.ByteLevel()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=names,
            show_progress=False,
        )
        backend.train_from_iterator(pieces(text), trainer)
        return cls(backend)

    def decoder(self) -> TokenDecoder:
        return _BPEDecoder(self)

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """Bytes of each id; empty for ids without a token."""
        to_byte = _byte_of_printable()
        table = [b""] * self.vocab_size
        for token, i in self.backend.get_vocab(with_added_tokens=False).items():
            encodes = all(character in to_byte for character in token)
            table[i] = bytes(map(to_byte.__getitem__, token)) if encodes else token.encode("utf-8")
        # Special tokens are verbatim.
        for i, token in self.backend.get_added_tokens_decoder().items():
            table[i] = token.content.encode("utf-8")
        return table


class _BPEDecoder(TokenDecoder):
    def __init__(self, tokenizer: BPETokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        self._tokenizer.check_id(token)
        return self._utf8.decode(self._tokenizer.token_bytes[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def byte_level_bpe(vocabulary: str | Path, merges: str | Path) -> BPETokenizer:
    """Read GPT-2's vocab.json and merges.txt.

    <|endoftext|> is a special token where the vocabulary has it.

    Raises:
        TokenizerError: a file is missing or invalid.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    hf = import_tokenizers()
    try:
        backend = hf.Tokenizer(hf.models.BPE.from_file(str(vocabulary), str(merges)))
    # The Rust code raises plain Exception for unreadable files.
    except Exception as error:
        raise TokenizerError(f"cannot read tokenizer {vocabulary}, {merges}: {error}") from None
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    if backend.token_to_id("<|endoftext|>") is not None:
        backend.add_special_tokens(["<|endoftext|>"])
    return BPETokenizer(backend)


def _byte_of_printable() -> dict[str, int]:
    """The byte of each printable character in byte-level BPE.

    Printable Latin-1 characters are their own byte; the characters from U+0100 on are the other
    bytes, in order (GPT-2's encoder.py, bytes_to_unicode).
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    table = {chr(byte): byte for byte in own}
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table
