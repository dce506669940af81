"""Read, split and tokenise training data, and make its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ...models.fields import from_fields
from ..data import tagged_text, text_pairs
from ..data import text as texts
from ..data.prepared import PreparedText
from ..tokenizers import TOKENIZER_KINDS, load_tokenizer, train_tokenizer
from ..tokenizers.base import Tokenizer
from .masking import MaskedTask
from .scores import import_sacrebleu
from .tagging import TaggingTask
from .task import LanguageTask, Task
from .translation import TranslationTask, encode_pairs

_Item = TypeVar("_Item")

_PAIRS: dict[str, Callable[[], list[text_pairs.Pair]]] = {
    "names": text_pairs.standard_library_pairs,
    "dates": text_pairs.date_pairs,
}


@dataclass(frozen=True)
class DataConfig:
    """Training data and tokenizer; each kind of model uses some fields.

    Args:
        text: paths of UTF-8 files: text, CoNLL (tagging) or TSV (translation); none = the standard
            library's source text.
        tokenizer: one of `TOKENIZER_KINDS`, or a path, as for `load_tokenizer`.
        vocab_size: target number of ids, except for "char".
        prepared: (gpt) a folder made by `fastattn prepare`, in place of text and tokenizer.
        validation: (tagger, seq2seq) files for validation; none = the last 10 % of the text.
        start_from: (tagger) a masked-token run's folder, for the initial encoder and the tokenizer.
        pairs: (seq2seq) generated pairs, without text: "names", docstrings of the standard
            library's functions and their names; "dates", in figures and in words.
        truncate: (seq2seq) cut texts that are too long for the model, instead of refusing them.
            Texts of the standard library are always cut.

    Raises:
        ValueError: there are no such pairs, or text is combined with pairs or prepared.
    """

    text: tuple[str, ...] = ()
    tokenizer: str = "char"
    vocab_size: int = 1024
    prepared: str | None = None
    validation: tuple[str, ...] = ()
    start_from: str | None = None
    pairs: str | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        if self.prepared is not None and self.text:
            raise ValueError("prepared data are in place of a text: leave out one of the two")
        if self.pairs not in (None, *_PAIRS):
            choices = " or ".join(map(repr, _PAIRS))
            raise ValueError(f"pairs must be {choices}, got {self.pairs!r}")
        if self.pairs is not None and self.text:
            raise ValueError("pairs are made where there is no text: leave out one of the two")

    def read(self) -> str:
        """The whole text."""
        return texts.read_text_files(self.text) if self.text else texts.standard_library_text()

    def make_tokenizer(self, text: str, *, special: bool) -> Tokenizer:
        """The tokenizer, trained on a text unless it is loaded."""
        if self.tokenizer not in TOKENIZER_KINDS:
            return load_tokenizer(self.tokenizer)
        return train_tokenizer(self.tokenizer, text, vocab_size=self.vocab_size, special=special)


@dataclass(frozen=True)
class Source:
    """Data that has been read but not yet tokenised.

    fingerprint: SHA-256 of all data, in hexadecimal. facts: about the data that inference needs,
    JSON values.
    """

    fingerprint: str
    make_tokenizer: Callable[[], Tokenizer]
    make_task: Callable[[Tokenizer, Any], Task]
    facts: Mapping[str, Any] = field(default_factory=dict)


def text_source(config: DataConfig, *, masked: bool = False) -> Source:
    """Source of a text for next-token prediction or, masked, masked-token prediction."""
    text = config.read()

    def make_tokenizer() -> Tokenizer:
        # Characters come from the whole text, merges from its training part alone.
        whole = config.tokenizer == "char" and not masked
        return config.make_tokenizer(text if whole else texts.split_text(text)[0], special=masked)

    def make_task(tokenizer: Tokenizer, model: Any) -> Task:
        dataset = texts.TextDataset.from_text(text, tokenizer, model.context_length)
        if masked:
            return MaskedTask(dataset, tokenizer, model.context_length)
        return LanguageTask(dataset, model.context_length)

    return Source(texts.fingerprint(text), make_tokenizer, make_task)


def language_source(config: DataConfig) -> Source:
    """Source of a text, or token files, for next-token prediction."""
    if config.prepared is None:
        return text_source(config)
    text = PreparedText.open(config.prepared)
    return Source(
        text.fingerprint,
        lambda: text.tokenizer,
        lambda tokenizer, model: LanguageTask(text, model.context_length),
    )


def tagged_source(config: DataConfig) -> Source:
    """Source of tagged words."""
    read = tagged_text.read_conll
    sentences = read(config.text) if config.text else tagged_text.standard_library_sentences()
    train, validation = _split(sentences, read(config.validation), "sentences")
    tags = tagged_text.tags_of(train)
    tagged_text.check_tags(validation, tags)
    digest = tagged_text.sentences_fingerprint([*train, *validation])
    # One word a line, so that every word starts as when encoded alone.
    words = "\n".join(word for sentence in train for word in sentence.words)

    def make_task(tokenizer: Tokenizer, model: Any) -> Task:
        options: dict[str, Any] = {"context_length": model.context_length, "fingerprint": digest}
        return TaggingTask(train, validation, tags=tags, tokenizer=tokenizer, **options)

    facts = {"tags": list(tags), "python": not config.text}
    return Source(digest, lambda: config.make_tokenizer(words, special=True), make_task, facts)


def pair_source(config: DataConfig) -> Source:
    """Source of pairs of texts, read or generated."""
    import_sacrebleu()
    read = text_pairs.read_pairs
    examples = read(config.text) if config.text else _PAIRS[config.pairs or "names"]()
    train, validation = _split(examples, read(config.validation), "pairs")
    digest = text_pairs.pairs_fingerprint([*train, *validation])
    lines = "\n".join(line for pair in train for line in (pair.source, pair.target))

    def make_task(tokenizer: Tokenizer, model: Any) -> Task:
        options = {"source_length": model.source_length, "target_length": model.target_length}
        cut = config.truncate or not config.text
        first, second = (
            encode_pairs(pairs, tokenizer, **options, truncate=cut) for pairs in (train, validation)
        )
        references = [pair.target for pair in validation]
        return TranslationTask(first, second, references, tokenizer=tokenizer, fingerprint=digest)

    return Source(digest, lambda: config.make_tokenizer(lines, special=True), make_task)


class Data(NamedTuple):
    """A kind's data: its reader and its fields of `DataConfig`."""

    read: Callable[[DataConfig], Source]
    defaults: Mapping[str, Any]

    def config(self, options: Mapping[str, Any]) -> DataConfig:
        """A configuration with these options.

        Raises:
            ValueError: an option is of a wrong type or out of range.
        """
        return from_fields(DataConfig, {**self.defaults, **options})

    def fields(self, config: DataConfig) -> dict[str, Any]:
        """The kind's fields of a configuration."""
        return {name: getattr(config, name) for name in self.defaults}


def _data(read: Callable[[DataConfig], Source], tokenizer: str, *names: str) -> Data:
    default = DataConfig(tokenizer=tokenizer)
    names = ("text", "tokenizer", "vocab_size", *names)
    return Data(read, {name: getattr(default, name) for name in names})


DATA: Mapping[str, Data] = {
    "gpt": _data(language_source, "char", "prepared"),
    "masked": _data(partial(text_source, masked=True), "bpe"),
    "tagger": _data(tagged_source, "bpe", "validation", "start_from"),
    "seq2seq": _data(pair_source, "bpe", "validation", "pairs", "truncate"),
}


def _split(
    items: Sequence[_Item], validation: Sequence[_Item], what: str
) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """Split into training and validation: all with validation data, else 90 % and 10 %."""
    if validation:
        return items, validation
    cut = len(items) - max(1, len(items) // 10)
    if cut < 1:
        raise texts.DataError(
            f"there are too few {what}: {len(items)}, at least 2 are needed, one to measure on"
        )
    return items[:cut], items[cut:]
