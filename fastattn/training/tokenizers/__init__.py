"""Tokenizers."""

from typing import NoReturn

from ...missing import raise_missing
from .backend import BackendTokenizer, byte_level_bpe
from .base import Tokenizer, TokenizerError
from .characters import CharacterTokenizer
from .loading import TOKENIZER_KINDS, from_json, load_tokenizer, train_tokenizer
from .named import NamedTokenizer

__all__ = [
    "TOKENIZER_KINDS",
    "BackendTokenizer",
    "CharacterTokenizer",
    "NamedTokenizer",
    "Tokenizer",
    "TokenizerError",
    "byte_level_bpe",
    "from_json",
    "load_tokenizer",
    "train_tokenizer",
]


def __getattr__(name: str) -> NoReturn:
    raise_missing(__name__, name)
