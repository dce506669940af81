"""Tokenizers: text to ids and back."""

from .base import Tokenizer, TokenizerError
from .bytes import BPETokenizer, byte_level_bpe
from .characters import CharacterTokenizer
from .loading import TOKENIZER_KINDS, from_json, load_tokenizer, train_tokenizer
from .pieces import PieceTokenizer

__all__ = [
    "TOKENIZER_KINDS",
    "BPETokenizer",
    "CharacterTokenizer",
    "PieceTokenizer",
    "Tokenizer",
    "TokenizerError",
    "byte_level_bpe",
    "from_json",
    "load_tokenizer",
    "train_tokenizer",
]
