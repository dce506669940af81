"""Adapter of Hugging Face `tokenizers` to the tokenizer interface, and the kinds to train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...missing import import_extra
from .base import SPECIAL_NAMES, Tokenizer, TokenizerError, check_texts, encodable

# Kinds of whole words by what they cut a text into: runs of anything but white space, and each
# white-space character; runs of letters and digits, and each other character; characters.
_CUTS = {"word-space": r"\s|\S+", "word-sign": r"\w+|\W", "char": r"[\s\S]"}
_SPECIAL, _UNKNOWN = [x[0] for x in SPECIAL_NAMES.values()], SPECIAL_NAMES["unknown"][0]
# Long texts are encoded in pieces of about this many characters, so that all cores take part.
_PIECE_CHARACTERS = 1 << 20


class BackendTokenizer(Tokenizer):
    """Hugging Face `tokenizers.Tokenizer` of any kind.

    Its padding, truncation and template of special tokens are not used. Unknown text becomes its
    unknown token; byte-level BPE knows every text.
    """

    def __init__(self, backend: Any) -> None:
        if backend.truncation or backend.padding:  # the caller keeps its own
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        self.backend = backend
        # Not the number of tokens, as ids may have gaps.
        self._vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        # A byte-level decoder would take the letters of added tokens for bytes.
        bytewise = type(backend.decoder).__name__ == "ByteLevel"
        added = backend.get_added_tokens_decoder() if bytewise else {}
        self._verbatim = {token: content.content for token, content in added.items()}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        return [token for ids in self.encode_batch(pieces(text)) for token in ids]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(encodable(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def text_of(self, tokens: Sequence[int]) -> str:
        return "".join(
            self.backend.decode([*run], skip_special_tokens=False)
            if content is None
            else content * len([*run])
            for content, run in groupby(tokens, self._verbatim.get)
        )

    def find_id(self, token: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def to_json(self) -> str:
        return str(self.backend.to_str())


def train_backend(kind: str, text: str, vocab_size: int, *, special: bool) -> BackendTokenizer:
    """Train a tokenizer of a kind other than "char"; see `train_tokenizer`."""
    hf = import_tokenizers()
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": _SPECIAL}
    if kind == "bpe":
        # Every byte is known.
        options["special_tokens"] = [x for x in _SPECIAL if special and x != _UNKNOWN]
        options["initial_alphabet"] = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    elif kind == "unigram":
        options["unk_token"] = _UNKNOWN
    least = len(options["special_tokens"]) + len(options.get("initial_alphabet", "?"))
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size must be at least {least} for tokenizer {kind!r}, special tokens included, "
            f"got {vocab_size}"
        )
    if kind == "char":
        del options["vocab_size"]
    backend = _assemble(hf, kind, **{} if kind in ("bpe", "unigram") else {"unk_token": _UNKNOWN})
    trainer = getattr(hf.trainers, f"{type(backend.model).__name__.replace('BPE', 'Bpe')}Trainer")
    try:
        if kind != "bpe" and not text.strip():
            raise ValueError("it needs a text, got none")
        backend.train_from_iterator(pieces(text), trainer(show_progress=False, **options))
    # The Rust code raises plain Exception if a text yields no vocabulary.
    except Exception as error:
        raise TokenizerError(f"cannot train a tokenizer of kind {kind!r}: {error}") from None
    return BackendTokenizer(backend)


def _assemble(hf: Any, kind: str, *vocabulary: Any, **options: Any) -> Any:
    """Make a `tokenizers.Tokenizer` of a kind: model, pre-tokenizer, decoder."""
    models, cuts, joins = hf.models, hf.pre_tokenizers, hf.decoders
    spaces = [part(prepend_scheme="never") for part in (cuts.Metaspace, joins.Metaspace)]
    parts = {
        "bpe": (models.BPE, cuts.ByteLevel(add_prefix_space=False), joins.ByteLevel()),
        # Runs of letters and digits, and runs of other signs.
        "word": (models.WordLevel, cuts.Whitespace(), joins.WordPiece()),
        # Merges of characters within words (Sennrich et al. 2016, arXiv 1508.07909).
        "char-bpe": (models.BPE, *spaces),
        # BERT's: the longest known piece at a time (Schuster & Nakajima 2012).
        "wordpiece": (models.WordPiece, cuts.BertPreTokenizer(), joins.WordPiece()),
        # The likeliest pieces under a unigram model (Kudo 2018, arXiv 1804.10959).
        "unigram": (models.Unigram, *spaces),
    }
    for name, pattern in _CUTS.items():
        parts[name] = (models.WordLevel, cuts.Split(hf.Regex(pattern), "isolated"), joins.Fuse())
    model, cut, join = parts[kind]
    backend = hf.Tokenizer(model(*vocabulary, **options))
    backend.pre_tokenizer, backend.decoder = cut, join
    return backend


def byte_level_bpe(vocabulary: str | Path, merges: str | Path) -> BackendTokenizer:
    """Read GPT-2's vocab.json and merges.txt.

    <|endoftext|> is a special token where the vocabulary has it.

    Raises:
        TokenizerError: a file is missing or invalid.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    hf = import_tokenizers()
    try:
        backend = _assemble(hf, "bpe", *hf.models.BPE.read_file(str(vocabulary), str(merges)))
    # The Rust code raises plain Exception for unreadable files.
    except Exception as error:
        raise TokenizerError(f"cannot read tokenizer {vocabulary}, {merges}: {error}") from None
    if backend.token_to_id("<|endoftext|>") is not None:
        backend.add_special_tokens(["<|endoftext|>"])
    return BackendTokenizer(backend)


def read_vocabulary(path: Path) -> BackendTokenizer:
    """Read a vocabulary file: one token per line, numbered from 0 (BERT's vocab.txt).

    With tokens that begin with ## it is a WordPiece tokenizer, else one of whole words.

    Raises:
        TokenizerError: it is unreadable, a line is empty or repeats a token, or there is no unknown
            token.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    hf = import_tokenizers()
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        vocabulary = {token: number for number, token in enumerate(lines)}
        for number, token in enumerate(lines):
            if not token.strip() or vocabulary[token] != number:
                expected = "a token is expected that no other line has"
                raise TokenizerError(f"line {number + 1}: {expected}, got {token!r}")
        unknown = [name for name in SPECIAL_NAMES["unknown"] if name in vocabulary]
        if not unknown:
            names = " or ".join(SPECIAL_NAMES["unknown"])
            raise TokenizerError(f"it has no unknown token, such as {names}")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read vocabulary {path}: {error}") from None
    kind = "wordpiece" if any(token.startswith("##") for token in lines) else "word"
    backend = _assemble(hf, kind, vocabulary, unk_token=unknown[0])
    special = {name for names in SPECIAL_NAMES.values() for name in names}
    backend.add_special_tokens(sorted(special & set(lines)))
    return BackendTokenizer(backend)


def import_tokenizers() -> Any:
    """Import `tokenizers`; ModuleNotFoundError names the extra."""
    return import_extra("tokenizers", "every tokenizer except the character tokenizer")


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of about 2^20 characters, after a line break or before a space."""
    check_texts([text])
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            space = text.rfind(" ", start + 1, end)
            end = text.rfind("\n", start, end) + 1 or (space if space > 0 else end)
        yield text[start:end]
        start = end
