"""Training data as the options name it: read, split, tokenised and made into a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..data.prepared import PreparedText
from ..data.tagged_text import (
    check_tags,
    read_conll,
    sentences_fingerprint,
    standard_library_sentences,
    tags_of,
)
from ..data.text import (
    DataError,
    TextDataset,
    fingerprint,
    read_text_files,
    split_text,
    standard_library_text,
)
from ..data.text_pairs import (
    Pair,
    date_pairs,
    pairs_fingerprint,
    read_pairs,
    standard_library_pairs,
)
from ..tokenizers import TOKENIZER_KINDS, load_tokenizer, train_tokenizer
from ..tokenizers.base import Tokenizer
from .masking import MaskedTask
from .prepared import PreparedTask
from .scores import import_sacrebleu
from .tagging import TaggingTask
from .task import LanguageTask, Task
from .translation import TranslationTask, encode_pairs

_Item = TypeVar("_Item")

_PAIRS: dict[str, Callable[[], list[Pair]]] = {
    "names": standard_library_pairs,
    "dates": date_pairs,
}


@dataclass(frozen=True)
class DataConfig:
    """Text to learn from, and the tokenizer that cuts it.

    Args:
        text: paths of UTF-8 text files; none = the standard library's source text.
        tokenizer: one of `TOKENIZER_KINDS`, or a path, as for `load_tokenizer`.
        vocab_size: ids that a tokenizer other than "char" aims at.
    """

    text: tuple[str, ...] = ()
    tokenizer: str = "char"
    vocab_size: int = 1024

    def read(self) -> str:
        """The whole text.

        Raises:
            DataError: a file is missing, empty or undecodable.
        """
        return read_text_files(self.text) if self.text else standard_library_text()

    def make_tokenizer(self, text: str) -> Tokenizer:
        """The tokenizer: characters of the whole text, merges of its training part alone.

        Raises:
            TokenizerError: the kind is unknown, or the file is unusable.
        """
        if self.tokenizer == "char":
            return train_tokenizer("char", text)
        return self._learn_tokenizer(split_text(text)[0], special=False)

    def _learn_tokenizer(self, text: str, *, special: bool) -> Tokenizer:
        if self.tokenizer in TOKENIZER_KINDS:
            return train_tokenizer(
                self.tokenizer, text, vocab_size=self.vocab_size, special=special
            )
        return load_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class LanguageDataConfig(DataConfig):
    """Text of a language model: a `DataConfig`, or prepared data.

    Args:
        prepared: a folder that `fastattn prepare` has made, in place of a text; it brings its
            tokenizer along.

    Raises:
        ValueError: a text is named beside it.
    """

    prepared: str | None = None

    def __post_init__(self) -> None:
        if self.prepared is not None and self.text:
            raise ValueError("prepared data are in place of a text: leave out one of the two")


@dataclass(frozen=True)
class MaskedDataConfig(DataConfig):
    """Text of a masked-token model: a `DataConfig` whose tokenizer has special tokens."""

    tokenizer: str = "bpe"

    def make_tokenizer(self, text: str) -> Tokenizer:
        return self._learn_tokenizer(split_text(text)[0], special=True)


@dataclass(frozen=True)
class LabelledDataConfig(DataConfig):
    """Data with answers: a `DataConfig` with validation files.

    Args:
        text: paths of files, CoNLL's or TSV; none = made from the standard library.
        validation: more such files to measure on; none = the last 10 % of the others.
    """

    tokenizer: str = "bpe"
    validation: tuple[str, ...] = ()

    def make_tokenizer(self, text: str) -> Tokenizer:
        return self._learn_tokenizer(text, special=True)


@dataclass(frozen=True)
class TaggedDataConfig(LabelledDataConfig):
    """Data for tagging: a `LabelledDataConfig` that may start from a masked-token run.

    Args:
        start_from: a masked-token run's folder, whose encoder and tokenizer to begin with.
    """

    start_from: str | None = None


@dataclass(frozen=True)
class PairDataConfig(LabelledDataConfig):
    """Pairs of texts for translation: a `LabelledDataConfig`, or pairs made on the spot.

    Args:
        pairs: without text, which ones to make: "names", docstrings of the standard library's
            functions with the words of their names; "dates", in figures and in words.
        truncate: cut texts that are too long for the model, instead of refusing them. Those of the
            standard library are always cut.

    Raises:
        ValueError: there are no such pairs, or a text is named beside them.
    """

    pairs: str | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        if self.pairs not in (None, *_PAIRS):
            known = " or ".join(map(repr, _PAIRS))
            raise ValueError(f"pairs must be {known}, got {self.pairs!r}")
        if self.pairs is not None and self.text:
            raise ValueError("pairs are made where there is no text: leave out one of the two")

    def read_pairs(self) -> list[Pair]:
        """The text's pairs, or those that are made.

        Raises:
            DataError: as `read_pairs` and `standard_library_pairs`.
        """
        return read_pairs(self.text) if self.text else _PAIRS[self.pairs or "names"]()


class Source(Protocol):
    """Data that has been read, before there are a tokenizer and a model for it."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all data, in hexadecimal."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data that a trained model's user needs, JSON values."""

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer that the options name."""

    def make_task(self, tokenizer: Tokenizer, model_config: Any) -> Task:
        """The task for a model of this configuration."""


class TextSource:
    """Text, to predict every next token of or to name hidden tokens of."""

    def __init__(self, config: DataConfig) -> None:
        self._config, self._text = config, config.read()
        self.fingerprint = fingerprint(self._text)
        self.facts: dict[str, Any] = {}

    def make_tokenizer(self) -> Tokenizer:
        return self._config.make_tokenizer(self._text)

    def make_task(self, tokenizer: Tokenizer, model_config: Any) -> Task:
        context = model_config.context_length
        dataset = TextDataset.from_text(self._text, tokenizer, context)
        if isinstance(self._config, MaskedDataConfig):
            return MaskedTask(dataset, tokenizer, context)
        return LanguageTask(dataset, context)


class PreparedSource:
    """Token files, to predict every next token of."""

    def __init__(self, folder: str) -> None:
        self._text = PreparedText.open(folder)
        self.fingerprint = self._text.fingerprint
        self.facts: dict[str, Any] = {}

    def make_tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def make_task(self, tokenizer: Tokenizer, model_config: Any) -> Task:
        return PreparedTask(self._text, model_config.context_length)


def language_source(config: LanguageDataConfig) -> Source:
    """The source of a configuration: token files or a text."""
    return TextSource(config) if config.prepared is None else PreparedSource(config.prepared)


class TaggedSource:
    """Words with tags."""

    def __init__(self, config: LabelledDataConfig) -> None:
        self._config = config
        found = read_conll(config.text) if config.text else standard_library_sentences()
        self._train, self._validation = _split(found, read_conll(config.validation), "sentences")
        self._tags = tags_of(self._train)
        check_tags(self._validation, self._tags)
        self.fingerprint = sentences_fingerprint([*self._train, *self._validation])
        self.facts = {"tags": list(self._tags), "python": not config.text}

    def make_tokenizer(self) -> Tokenizer:
        # A word a line: every word begins as it does when it is encoded alone.
        words = (word for sentence in self._train for word in sentence.words)
        return self._config.make_tokenizer("\n".join(words))

    def make_task(self, tokenizer: Tokenizer, model_config: Any) -> Task:
        return TaggingTask(
            self._train,
            self._validation,
            tags=self._tags,
            tokenizer=tokenizer,
            context_length=model_config.context_length,
            fingerprint=self.fingerprint,
        )


class PairSource:
    """Pairs of texts."""

    def __init__(self, config: PairDataConfig) -> None:
        import_sacrebleu()
        self._config = config
        self._train, self._validation = _split(
            config.read_pairs(), read_pairs(config.validation), "pairs"
        )
        self.fingerprint = pairs_fingerprint([*self._train, *self._validation])
        self.facts: dict[str, Any] = {}

    def make_tokenizer(self) -> Tokenizer:
        lines = (line for pair in self._train for line in (pair.source, pair.target))
        return self._config.make_tokenizer("\n".join(lines))

    def make_task(self, tokenizer: Tokenizer, model_config: Any) -> Task:
        train, validation = (
            encode_pairs(
                pairs,
                tokenizer,
                source_length=model_config.source_length,
                target_length=model_config.target_length,
                truncate=self._config.truncate or not self._config.text,
            )
            for pairs in (self._train, self._validation)
        )
        return TranslationTask(
            train,
            validation,
            [pair.target for pair in self._validation],
            tokenizer=tokenizer,
            fingerprint=self.fingerprint,
        )


def _split(
    found: Sequence[_Item], validation: Sequence[_Item], what: str
) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """All for training where there is other data to measure on, else 90 % of it."""
    if validation:
        return found, validation
    cut = len(found) - max(1, len(found) // 10)
    if cut < 1:
        raise DataError(
            f"there are too few {what}: {len(found)}, at least 2 are needed, one to measure on"
        )
    return found[:cut], found[cut:]
