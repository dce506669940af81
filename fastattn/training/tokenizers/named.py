"""Encodings of `tiktoken`, such as GPT-2's, by name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence

from .base import Tokenizer, TokenizerError, encodable

NAMED_FORMAT = "fastattn-tiktoken"


class NamedTokenizer(Tokenizer):
    """An encoding of `tiktoken`; special tokens in a text are encoded as such.

    Args:
        name: "gpt2", "cl100k_base", "o200k_base", ...; the tokenizer's JSON holds it alone.

    Raises:
        TokenizerError: there is no such encoding, or tiktoken cannot fetch it.
        ModuleNotFoundError: `tiktoken` is not installed.
    """

    def __init__(self, name: str) -> None:
        try:
            tiktoken = importlib.import_module("tiktoken")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"tokenizer {name!r} needs the package tiktoken, which is not installed: pip "
                "install tiktoken",
                name=error.name,
            ) from error
        if name not in (names := tiktoken.list_encoding_names()):
            raise TokenizerError(f"tiktoken's encodings are {', '.join(names)}, got {name!r}")
        try:
            self.encoding = tiktoken.get_encoding(name)
        # Whatever its way to the network raises.
        except Exception as error:
            raise TokenizerError(f"tiktoken cannot load encoding {name!r}: {error}") from error
        self.name = name

    @property
    def vocab_size(self) -> int:
        return int(self.encoding.n_vocab)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        return list(self.encoding.encode_batch(encodable(texts), allowed_special="all"))

    def text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    def find_id(self, token: str) -> int | None:
        try:
            return int(self.encoding.encode_single_token(token))
        except KeyError:
            return None

    def to_json(self) -> str:
        return json.dumps({"format": NAMED_FORMAT, "name": self.name})

    def _bytes(self, token: int) -> bytes:
        try:
            return bytes(self.encoding.decode_single_token_bytes(token))
        except KeyError:
            return b""  # ids may have gaps
