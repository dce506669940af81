"""Train or load a tokenizer, by kind, JSON or file."""

from __future__ import annotations

import json
from pathlib import Path

from .backend import import_tokenizers
from .base import Tokenizer, TokenizerError
from .bytes import BPETokenizer, byte_level_bpe
from .characters import CHARACTER_FORMAT, CharacterTokenizer
from .pieces import PIECE_KINDS, PieceTokenizer, read_vocabulary

TOKENIZER_KINDS = ("char", "bpe", *(kind for kind in PIECE_KINDS if kind != "char"))
_JSON, _VOCABULARY, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"


def train_tokenizer(
    kind: str, text: str, *, vocab_size: int = 1024, special: bool = False
) -> Tokenizer:
    """Train a tokenizer on a text.

    Args:
        kind: "char" (one id a character), "bpe" (byte-level), "word" (runs of letters, and of other
            signs; white space is dropped), "word-space" (words with their punctuation, and the
            white space between them, so that a text of known words comes back exactly),
            "word-sign" (the same with every sign on its own: "cream", "."), "char-bpe",
            "wordpiece" or "unigram".
        text: training text.
        vocab_size: target number of ids; "char" has one per character of the text.
        special: include the special tokens of `SPECIAL_NAMES`. Without them "char" rejects
            characters outside the text; the kinds after "bpe" always include them.

    Raises:
        TokenizerError: kind is unknown, or as the tokenizer's class.
    """
    if kind == "char" and not special:
        return CharacterTokenizer(text)
    # No text yields more, and the libraries take room for all at once.
    vocab_size = min(vocab_size, 1000 + 4 * len(text))
    if kind == "bpe":
        return BPETokenizer.train(text, vocab_size, special=special)
    if kind in TOKENIZER_KINDS:
        return PieceTokenizer.train(kind, text, vocab_size)
    kinds = ", ".join(repr(kinds) for kinds in TOKENIZER_KINDS)
    raise TokenizerError(f"tokenizer must be one of {kinds}, got {kind!r}")


def from_json(text: str, *, source: str = "the tokenizer") -> Tokenizer:
    """Reads `Tokenizer.to_json`, or the JSON of any Hugging Face tokenizer.

    Args:
        text: the JSON.
        source: its name in error messages.

    Raises:
        TokenizerError: the text is not the JSON of a tokenizer.
        ModuleNotFoundError: a Hugging Face tokenizer needs `tokenizers`.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{source} is not JSON: {error}") from None
    if isinstance(fields, dict) and fields.get("format") == CHARACTER_FORMAT:
        characters = fields.get("characters")
        if not isinstance(characters, str):
            raise TokenizerError(f"{source} has no text under 'characters'")
        return CharacterTokenizer(characters)
    if not isinstance(fields, dict) or "model" not in fields:
        raise TokenizerError(f"{source} is neither a character tokenizer nor a Hugging Face one")
    hf = import_tokenizers()
    try:
        backend = hf.Tokenizer.from_str(text)
    # The Rust code raises plain Exception for unreadable files.
    except Exception as error:
        raise TokenizerError(
            f"{source} cannot be read by Hugging Face tokenizers: {error}"
        ) from None
    byte_level = type(backend.decoder).__name__ == "ByteLevel"
    return BPETokenizer(backend) if byte_level else PieceTokenizer(backend)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a file or folder.

    Args:
        path: a tokenizer's JSON file (see `from_json`), a vocabulary file that ends in .txt (see
            `read_vocabulary`), or a folder with tokenizer.json or with GPT-2's vocab.json and
            merges.txt.

    Raises:
        TokenizerError: the file is missing, unreadable or no tokenizer.
    """
    path = Path(path)
    if path.is_dir():
        if (path / _JSON).exists():
            path = path / _JSON
        elif (path / _VOCABULARY).exists() and (path / _MERGES).exists():
            return byte_level_bpe(path / _VOCABULARY, path / _MERGES)
        else:
            raise TokenizerError(
                f"{path} has no tokenizer: neither {_JSON} nor {_VOCABULARY} with {_MERGES}"
            )
    if path.suffix == ".txt":
        return read_vocabulary(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        message = f"cannot read tokenizer {path}: {error.strerror}"
        if len(path.parts) == 1 and not path.suffix:
            message += f"; the kinds that can be trained are {', '.join(TOKENIZER_KINDS)}"
        raise TokenizerError(message) from None
    except UnicodeDecodeError:
        raise TokenizerError(f"tokenizer {path} is not UTF-8 text") from None
    return from_json(text, source=f"tokenizer {path}")
