"""Train or load a tokenizer, by kind, name, JSON or file."""

from __future__ import annotations

import json
from pathlib import Path

from ...checks import check_int
from .backend import (
    BackendTokenizer,
    byte_level_bpe,
    import_tokenizers,
    read_vocabulary,
    train_backend,
)
from .base import Tokenizer, TokenizerError, check_texts
from .characters import CHARACTER_FORMAT, CharacterTokenizer
from .named import NAMED_FORMAT, NamedTokenizer

TOKENIZER_KINDS = (
    *("char", "bpe", "word", "word-space", "word-sign", "char-bpe", "wordpiece", "unigram"),
)
_JSON, _VOCABULARY, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"


def train_tokenizer(
    kind: str, text: str, *, vocab_size: int = 1024, special: bool = False
) -> Tokenizer:
    """Train a tokenizer on a text.

    Args:
        kind: "char" (one id per character), "bpe" (byte-level, as GPT-2's), "word" (runs of
            letters, and of other signs; white space is dropped), "word-space" (words with their
            punctuation, and white space: a text of known words comes back exactly),
            "word-sign" (the same with every sign on its own: "cream", "."), "char-bpe", "wordpiece"
            or "unigram". Hugging Face's trainers of the last two are not deterministic: to repeat a
            run, pass the saved tokenizer.
        text: training text.
        vocab_size: target number of ids, of which a short text yields fewer; "char" has one per
            character of the text.
        special: begin with the special tokens of `SPECIAL_NAMES` ("bpe" has no unknown one).
            Without them "char" rejects characters outside the text; the kinds after "bpe" always
            have them.

    Raises:
        TokenizerError: kind is unknown, vocab_size too small, or the text empty.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    if kind not in TOKENIZER_KINDS:
        kinds = ", ".join(map(repr, TOKENIZER_KINDS))
        raise TokenizerError(f"tokenizer must be one of {kinds}, got {kind!r}")
    check_texts([text])
    vocab_size = check_int("vocab_size", vocab_size)
    if kind == "char" and not special:
        return CharacterTokenizer(text)
    # No text yields more, and the libraries take room for all at once.
    return train_backend(kind, text, min(vocab_size, 1000 + 4 * len(text)), special=special)


def from_json(text: str, *, source: str = "the tokenizer") -> Tokenizer:
    """Read `Tokenizer.to_json`, or the JSON of any Hugging Face tokenizer.

    Args:
        text: the JSON.
        source: its name in error messages.

    Raises:
        TokenizerError: the text is not the JSON of a tokenizer.
        ModuleNotFoundError: the tokenizer needs `tokenizers` or `tiktoken`.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{source} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not {"format", "model"} & set(fields):
        raise TokenizerError(f"{source} is neither a character tokenizer nor a Hugging Face one")
    for form, key, own in (
        (CHARACTER_FORMAT, "characters", CharacterTokenizer),
        (NAMED_FORMAT, "name", NamedTokenizer),
    ):
        if fields.get("format") == form:
            if not isinstance(value := fields.get(key), str):
                raise TokenizerError(f"{source} has no text under {key!r}")
            return own(value)
    hf = import_tokenizers()
    try:
        return BackendTokenizer(hf.Tokenizer.from_str(text))
    # The Rust code raises plain Exception for unreadable files.
    except Exception as error:
        raise TokenizerError(
            f"{source} cannot be read by Hugging Face tokenizers: {error}"
        ) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a file or folder, or one of `tiktoken` by name.

    Args:
        path: a tokenizer's JSON file (see `from_json`), a vocabulary file that ends in .txt (see
            `read_vocabulary`), a folder with tokenizer.json or with GPT-2's vocab.json and
            merges.txt, or the name of an encoding of `tiktoken`, such as "gpt2".

    Raises:
        TokenizerError: the file is missing, unreadable or no tokenizer.
        ModuleNotFoundError: the tokenizer needs `tokenizers` or `tiktoken`.
    """
    path = Path(path)
    if len(path.parts) == 1 and not path.suffix and not path.exists():
        try:
            return NamedTokenizer(path.name)
        except (TokenizerError, ModuleNotFoundError) as error:
            kinds = f"the kinds that can be trained are {', '.join(TOKENIZER_KINDS)}"
            raise TokenizerError(f"there is no file {path}; {kinds}; {error}") from None
    if path.is_dir():
        path, *both = (path / name for name in (_JSON, _VOCABULARY, _MERGES))
        if not path.exists():
            if all(file.exists() for file in both):
                return byte_level_bpe(*both)
            names = f"neither {_JSON} nor {_VOCABULARY} with {_MERGES}"
            raise TokenizerError(f"{path.parent} has no tokenizer: {names}")
    if path.suffix == ".txt":
        return read_vocabulary(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read tokenizer {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenizerError(f"tokenizer {path} is not UTF-8 text") from None
    return from_json(text, source=f"tokenizer {path}")
