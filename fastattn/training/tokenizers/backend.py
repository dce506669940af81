"""Adapter of Hugging Face `tokenizers` to the tokenizer interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..extras import import_extra
from .base import TokenDecoder, Tokenizer, TokenizerError

# Long texts are encoded in pieces of about this many characters, cut after a line break, as Hugging
# Face's encoder holds some hundred bytes a token during a call.
_PIECE_CHARACTERS = 1 << 20


class BackendTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` of any kind.

    Its own padding and truncation are taken off; its template of special tokens is not used.
    """

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        # Not the number of tokens, as ids may have gaps.
        self._vocab_size = max(backend.get_vocab().values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        return [token for ids in self.encode_batch(pieces(text)) for token in ids]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        texts = list(texts)
        for text in texts:
            _check_encodable(text)
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def find_id(self, token: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def decoder(self) -> TokenDecoder:
        return _StreamDecoder(self)

    def to_json(self) -> str:
        text: str = self.backend.to_str()
        return text


class _StreamDecoder(TokenDecoder):
    """Hugging Face's incremental decoder, with special tokens verbatim."""

    def __init__(self, tokenizer: BackendTokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = import_extra("tokenizers.decoders", "a tokenizer of pieces")
        self._stream = decoders.DecodeStream(skip_special_tokens=False)

    def feed(self, token: int) -> str:
        self._tokenizer.check_id(token)
        text: str | None = self._stream.step(self._tokenizer.backend, token)
        return text or ""

    def finish(self) -> str:
        return ""


def import_tokenizers() -> Any:
    """The package `tokenizers`, with the used submodules; ModuleNotFoundError names the extra."""
    purpose = "every tokenizer except the character tokenizer"
    hf = import_extra("tokenizers", purpose)
    for name in ("decoders", "models", "pre_tokenizers", "trainers"):
        import_extra(f"tokenizers.{name}", purpose)
    return hf


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of about 2^20 characters, after line breaks where possible."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = end if line_end < 0 else line_end + 1
        yield text[start:end]
        start = end


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds {text[error.start]!r} at position {error.start}, which is half "
            "of a character and has no UTF-8 encoding"
        ) from None
