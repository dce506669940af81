"""Tokenizers of words, characters and pieces of words, with special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backend import BackendTokenizer, import_tokenizers, pieces
from .base import SPECIAL_NAMES, TokenizerError

_NAMES = [names[0] for names in SPECIAL_NAMES.values()]
_UNKNOWN = SPECIAL_NAMES["unknown"][0]
_CONTINUES = "##"


class PieceTokenizer(BackendTokenizer):
    """Any tokenizer of Hugging Face that is not byte-level: what it does not know is [UNK].

    Text that comes back from ids is the one that went in, but for unknown characters, and for
    white space where the kind drops it ("word" and "wordpiece"; "word-space" and "word-sign" keep
    it).
    """

    @classmethod
    def train(cls, kind: str, text: str, vocab_size: int) -> PieceTokenizer:
        """Learns a vocabulary from a text, beginning with `[PAD] [UNK] [BEGIN] [END] [MASK]`.

        Args:
            kind: one of `PIECE_KINDS`.
            text: what to learn from.
            vocab_size: ids to aim at; fewer where the text has no more to offer. "char" has one for
                every character, whatever this says.

        Raises:
            TokenizerError: kind is unknown, the text has nothing to learn from, or vocab_size is
                too small.
            ModuleNotFoundError: `tokenizers` is not installed.

        Note:
            Hugging Face's trainers of "wordpiece" and "unigram" number equal candidates
            differently from time to time. To repeat a run, give it the saved tokenizer.
        """
        if kind not in PIECE_KINDS:
            raise TokenizerError(f"kind must be one of {', '.join(PIECE_KINDS)}, got {kind!r}")
        if vocab_size <= len(_NAMES):
            raise TokenizerError(
                f"vocab_size must be over {len(_NAMES)}, the number of special tokens, "
                f"got {vocab_size}"
            )
        if not text.strip():
            raise TokenizerError(f"a tokenizer of kind {kind!r} needs a text, got none")
        hf = import_tokenizers()
        recipe = _RECIPES[kind](hf)
        backend = recipe.assemble(hf)
        keywords: dict[str, Any] = {"special_tokens": _NAMES, "show_progress": False}
        if kind != "char":
            keywords["vocab_size"] = vocab_size
        if kind == "unigram":
            keywords["unk_token"] = _UNKNOWN
        try:
            backend.train_from_iterator(pieces(text), recipe.trainer(**keywords))
        # The Rust side raises plain Exception for a text from which it can make no vocabulary.
        except Exception as error:
            raise TokenizerError(f"cannot train a tokenizer of kind {kind!r}: {error}") from None
        return cls(backend)

    def decode(self, tokens: Iterable[int]) -> str:
        tokens = list(tokens)
        for token in tokens:
            self.check_id(token)
        text: str = self.backend.decode(tokens, skip_special_tokens=False)
        return text


@dataclass(frozen=True)
class _Recipe:
    """The parts of a tokenizer and what trains its model."""

    model: Any
    splitter: Any
    joiner: Any
    trainer: Callable[..., Any]

    def assemble(self, hf: Any) -> Any:
        backend = hf.Tokenizer(self.model)
        backend.pre_tokenizer, backend.decoder = self.splitter, self.joiner
        return backend


def _words(hf: Any) -> _Recipe:
    """Runs of letters and digits, and runs of other signs."""
    return _Recipe(
        hf.models.WordLevel(unk_token=_UNKNOWN),
        hf.pre_tokenizers.Whitespace(),
        hf.decoders.WordPiece(prefix=_CONTINUES),
        hf.trainers.WordLevelTrainer,
    )


def _words_and_spaces(hf: Any, cut: str = r"\s|\S+") -> _Recipe:
    """Runs of anything but white space, punctuation included, and each white-space character."""
    return _Recipe(
        hf.models.WordLevel(unk_token=_UNKNOWN),
        hf.pre_tokenizers.Split(hf.Regex(cut), "isolated"),
        hf.decoders.Fuse(),
        hf.trainers.WordLevelTrainer,
    )


def _words_signs_and_spaces(hf: Any) -> _Recipe:
    """Runs of letters and digits, each other sign and each white-space character."""
    return _words_and_spaces(hf, r"\w+|\W")


def _characters(hf: Any) -> _Recipe:
    return _Recipe(
        hf.models.WordLevel(unk_token=_UNKNOWN),
        hf.pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated"),
        hf.decoders.Fuse(),
        hf.trainers.WordLevelTrainer,
    )


def _character_pairs(hf: Any) -> _Recipe:
    """Merges of characters within words (Sennrich et al. 2016, arXiv 1508.07909)."""
    return _Recipe(
        hf.models.BPE(unk_token=_UNKNOWN),
        hf.pre_tokenizers.Metaspace(prepend_scheme="never"),
        hf.decoders.Metaspace(prepend_scheme="never"),
        hf.trainers.BpeTrainer,
    )


def _word_pieces(hf: Any) -> _Recipe:
    """BERT's: the longest known piece at a time (Schuster & Nakajima 2012)."""
    return _Recipe(
        hf.models.WordPiece(unk_token=_UNKNOWN),
        hf.pre_tokenizers.BertPreTokenizer(),
        hf.decoders.WordPiece(prefix=_CONTINUES),
        hf.trainers.WordPieceTrainer,
    )


def _unigram(hf: Any) -> _Recipe:
    """The likeliest pieces under a unigram model (Kudo 2018, arXiv 1804.10959)."""
    return _Recipe(
        hf.models.Unigram(),
        hf.pre_tokenizers.Metaspace(prepend_scheme="never"),
        hf.decoders.Metaspace(prepend_scheme="never"),
        hf.trainers.UnigramTrainer,
    )


_RECIPES: dict[str, Callable[[Any], _Recipe]] = {
    "word": _words,
    "word-space": _words_and_spaces,
    "word-sign": _words_signs_and_spaces,
    "char": _characters,
    "char-bpe": _character_pairs,
    "wordpiece": _word_pieces,
    "unigram": _unigram,
}
PIECE_KINDS = tuple(_RECIPES)


def read_vocabulary(path: str | Path) -> PieceTokenizer:
    """Reads a vocabulary file: UTF-8, one token a line, numbered from 0 (BERT's vocab.txt).

    With tokens that begin with ## it is a WordPiece tokenizer, without any one of whole words.

    Raises:
        TokenizerError: the file is unreadable, a line is empty or repeats a token, or there is no
            unknown token; the message names the line.
        ModuleNotFoundError: `tokenizers` is not installed.
    """
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(_lines(Path(path)), start=1):
        if not token.strip():
            raise TokenizerError(f"{path}:{number}: the line is empty, a token is expected")
        if token in vocabulary:
            raise TokenizerError(
                f"{path}:{number}: token {token!r} stands on line {vocabulary[token] + 1} already"
            )
        vocabulary[token] = number - 1
    unknown = next((name for name in SPECIAL_NAMES["unknown"] if name in vocabulary), None)
    if unknown is None:
        raise TokenizerError(
            f"{path} has no unknown token, such as {' or '.join(SPECIAL_NAMES['unknown'])}"
        )
    hf = import_tokenizers()
    continues = any(token.startswith(_CONTINUES) and token != _CONTINUES for token in vocabulary)
    recipe = _word_pieces(hf) if continues else _words(hf)
    kind = hf.models.WordPiece if continues else hf.models.WordLevel
    model = kind(vocabulary, unk_token=unknown)
    backend = _Recipe(model, recipe.splitter, recipe.joiner, recipe.trainer).assemble(hf)
    special = {name for names in SPECIAL_NAMES.values() for name in names}
    backend.add_special_tokens([token for token in vocabulary if token in special])
    return PieceTokenizer(backend)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read vocabulary {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenizerError(f"vocabulary {path} is not UTF-8 text") from None
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines
