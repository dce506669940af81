"""Word, character and subword tokenizers with special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .backend import BackendTokenizer, import_tokenizers, pieces
from .base import SPECIAL_NAMES, TokenizerError

_NAMES = [names[0] for names in SPECIAL_NAMES.values()]
_UNKNOWN = SPECIAL_NAMES["unknown"][0]
_CONTINUES = "##"


class PieceTokenizer(BackendTokenizer):
    """A Hugging Face tokenizer that is not byte-level; unknown text becomes [UNK].

    Decoding restores the text, except for unknown characters, and for white space with "word" and
    "wordpiece".
    """

    @classmethod
    def train(cls, kind: str, text: str, vocab_size: int) -> PieceTokenizer:
        """Learn a vocabulary from a text, after `[PAD] [UNK] [BEGIN] [END] [MASK]`.

        Args:
            kind: one of `PIECE_KINDS`.
            text: training text.
            vocab_size: target number of ids; a short text yields fewer. Ignored by "char", which
                has one per character.

        Raises:
            TokenizerError: kind is unknown, the text is empty, or vocab_size is too small.
            ModuleNotFoundError: `tokenizers` is not installed.

        Note:
            Hugging Face's trainers of "wordpiece" and "unigram" are not deterministic. To repeat a
            run, pass the saved tokenizer.
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
        recipe = _RECIPES[kind]
        unknown = {"unk_token": _UNKNOWN}
        of_model, of_trainer = ({}, unknown) if kind == "unigram" else (unknown, {})
        model = getattr(hf.models, recipe.model)(**of_model)
        backend = recipe.assemble(hf, model)
        keywords: dict[str, Any] = {"special_tokens": _NAMES, "show_progress": False, **of_trainer}
        if kind != "char":
            keywords["vocab_size"] = vocab_size
        trainer = getattr(hf.trainers, recipe.model.replace("BPE", "Bpe") + "Trainer")
        try:
            backend.train_from_iterator(pieces(text), trainer(**keywords))
        # The Rust code raises plain Exception if a text yields no vocabulary.
        except Exception as error:
            raise TokenizerError(f"cannot train a tokenizer of kind {kind!r}: {error}") from None
        return cls(backend)

    def decode(self, tokens: Iterable[int]) -> str:
        tokens = list(tokens)
        for token in tokens:
            self.check_id(token)
        text: str = self.backend.decode(tokens, skip_special_tokens=False)
        return text


class _Recipe(NamedTuple):
    """Names of the parts of a `tokenizers` tokenizer, and their options.

    Args:
        model: of `tokenizers.models`; its trainer has the same name.
        splitter, joiner: of `pre_tokenizers` and `decoders`.
        cut: the splitter's regular expression.
        options: of splitter and joiner.
    """

    model: str
    splitter: str
    joiner: str
    cut: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})

    def assemble(self, hf: Any, model: Any) -> Any:
        backend = hf.Tokenizer(model)
        cut = (hf.Regex(self.cut), "isolated") if self.cut else ()
        options = self.options if self.splitter == self.joiner else {}
        backend.pre_tokenizer = getattr(hf.pre_tokenizers, self.splitter)(*cut, **options)
        backend.decoder = getattr(hf.decoders, self.joiner)(**self.options)
        return backend


_CONTINUED = {"prefix": _CONTINUES}
_IN_WORDS = {"prepend_scheme": "never"}
_RECIPES: dict[str, _Recipe] = {
    # Runs of letters and digits, and runs of other signs.
    "word": _Recipe("WordLevel", "Whitespace", "WordPiece", options=_CONTINUED),
    # Runs of anything but white space, punctuation included, and each white-space character.
    "word-space": _Recipe("WordLevel", "Split", "Fuse", r"\s|\S+"),
    # Runs of letters and digits, each other sign and each white-space character.
    "word-sign": _Recipe("WordLevel", "Split", "Fuse", r"\w+|\W"),
    "char": _Recipe("WordLevel", "Split", "Fuse", r"[\s\S]"),
    # Merges of characters within words (Sennrich et al. 2016, arXiv 1508.07909).
    "char-bpe": _Recipe("BPE", "Metaspace", "Metaspace", options=_IN_WORDS),
    # BERT's: the longest known piece at a time (Schuster & Nakajima 2012).
    "wordpiece": _Recipe("WordPiece", "BertPreTokenizer", "WordPiece", options=_CONTINUED),
    # The likeliest pieces under a unigram model (Kudo 2018, arXiv 1804.10959).
    "unigram": _Recipe("Unigram", "Metaspace", "Metaspace", options=_IN_WORDS),
}
PIECE_KINDS = tuple(_RECIPES)


def read_vocabulary(path: str | Path) -> PieceTokenizer:
    """Reads a vocabulary file: UTF-8, one token a line, numbered from 0 (BERT's vocab.txt).

    With tokens that begin with ## it is a WordPiece tokenizer, else one of whole words.

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
                f"{path}:{number}: token {token!r} is on line {vocabulary[token] + 1} already"
            )
        vocabulary[token] = number - 1
    unknown = next((name for name in SPECIAL_NAMES["unknown"] if name in vocabulary), None)
    if unknown is None:
        raise TokenizerError(
            f"{path} has no unknown token, such as {' or '.join(SPECIAL_NAMES['unknown'])}"
        )
    hf = import_tokenizers()
    continues = any(token.startswith(_CONTINUES) and token != _CONTINUES for token in vocabulary)
    recipe = _RECIPES["wordpiece" if continues else "word"]
    model = getattr(hf.models, recipe.model)(vocabulary, unk_token=unknown)
    backend = recipe.assemble(hf, model)
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
