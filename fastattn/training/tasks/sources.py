"""Read, split and tokenize training data, and make its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..data import text as texts
from ..tokenizers import TOKENIZER_KINDS, load_tokenizer, train_tokenizer
from ..tokenizers.base import Tokenizer
from ..train_config import DataConfig
from .task import LanguageTask, Task

_Item = TypeVar("_Item")


def read_text(config: DataConfig) -> str:
    """Read the whole text."""
    return texts.read_text_files(config.text) if config.text else texts.standard_library_text()


def make_tokenizer(config: DataConfig, text: str, *, special: bool) -> Tokenizer:
    """Load the tokenizer, or train it on a text; special: with special tokens."""
    name = config.tokenizer or ("bpe" if special else "char")
    if name not in TOKENIZER_KINDS:
        return load_tokenizer(name)
    return train_tokenizer(name, text, vocab_size=config.vocab_size, special=special)


@dataclass(frozen=True)
class Source:
    """Data that has been read but not yet tokenized.

    fingerprint: SHA-256 of all data, in hexadecimal. facts: about the data that inference needs,
    JSON values.
    """

    fingerprint: str
    make_tokenizer: Callable[[], Tokenizer]
    make_task: Callable[[Tokenizer, Any], Task]
    facts: Mapping[str, Any] = field(default_factory=dict)


def text_source(config: DataConfig, *, masked: bool = False) -> Source:
    """Make the source of a text for next-token or, masked, masked-token prediction."""
    text = read_text(config)

    def tokenizer() -> Tokenizer:
        # Characters come from the whole text, merges from its training part alone.
        whole = config.tokenizer in (None, "char") and not masked
        part = text if whole else texts.split_text(text)[0]
        return make_tokenizer(config, part, special=masked)

    def make_task(tokenizer: Tokenizer, model: Any) -> Task:
        dataset = texts.TextDataset.from_text(text, tokenizer, model.context_length)
        if masked:
            from .masking import MaskedTask

            return MaskedTask(dataset, tokenizer, model.context_length)
        return LanguageTask(dataset, model.context_length)

    return Source(texts.fingerprint(text), tokenizer, make_task)


def language_source(config: DataConfig) -> Source:
    """Make the source of a text, or of token files, for next-token prediction."""
    if config.prepared is None:
        return text_source(config)
    from ..data.prepared import PreparedText

    text = PreparedText.open(config.prepared)
    return Source(
        text.fingerprint,
        lambda: text.tokenizer,
        lambda tokenizer, model: LanguageTask(text, model.context_length),
    )


def tagged_source(config: DataConfig) -> Source:
    """Make the source of tagged words."""
    from ..data import tagged_text
    from .tagging import TaggingTask

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
    return Source(digest, lambda: make_tokenizer(config, words, special=True), make_task, facts)


def pair_source(config: DataConfig) -> Source:
    """Make the source of pairs of texts, read or generated."""
    from ..data import text_pairs
    from .scores import import_sacrebleu
    from .translation import TranslationTask, encode_pairs

    import_sacrebleu()
    read = text_pairs.read_pairs
    made = {"names": text_pairs.standard_library_pairs, "dates": text_pairs.date_pairs}
    examples = read(config.text) if config.text else made[config.pairs or "names"]()
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

    return Source(digest, lambda: make_tokenizer(config, lines, special=True), make_task)


# Of each kind: its reader, and the fields of `DataConfig` that only some kinds have.
SOURCES: Mapping[str, tuple[Callable[[DataConfig], Source], tuple[str, ...]]] = {
    "gpt": (language_source, ("prepared",)),
    "masked": (partial(text_source, masked=True), ()),
    "tagger": (tagged_source, ("validation", "start_from")),
    "seq2seq": (pair_source, ("validation", "pairs", "truncate")),
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
