"""Tagged words: CoNLL files, and Python source tagged by its tokenizer.

The tags of Python's tokens are name, keyword, number, string, operator and comment.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .text import DataError, fingerprint, read_lines, standard_library_sources

_PYTHON_TAGS = {"NUMBER": "number", "OP": "operator", "COMMENT": "comment"}
_LINE_ENDS = {tokenize.NEWLINE, tokenize.NL}


@dataclass(frozen=True)
class Sentence:
    """Words that belong together, each with its tag and its place, "FILE:LINE"; not empty."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    places: tuple[str, ...]


def read_conll(paths: Iterable[str | Path]) -> list[Sentence]:
    """Read CoNLL files: a word per line, columns separated by spaces, the tag last.

    An empty line ends a sentence; -DOCSTART- lines are skipped. What cannot be read is a DataError,
    as is a line with more or fewer columns than the file's first.
    """
    return [sentence for path in paths for sentence in _conll_sentences(Path(path))]


def _conll_sentences(path: Path) -> list[Sentence]:
    sentences: list[Sentence] = []
    rows: list[tuple[str, str, str]] = []
    expected = 0
    for number, line in enumerate([*read_lines(path), ""], start=1):
        columns = line.split()
        if columns and columns[0] == "-DOCSTART-":
            continue
        if len(columns) == 1:
            raise DataError(f"{path}:{number}: word {columns[0]!r} has no tag")
        if columns:
            expected = expected or len(columns)
            if len(columns) != expected:
                raise DataError(
                    f"{path}:{number}: {expected} columns are expected, got {len(columns)}"
                )
            rows.append((columns[0], columns[-1], f"{path}:{number}"))
        elif rows:
            sentences.append(_sentence(rows))
            rows = []
    if not sentences:
        raise DataError(f"{path} has no word with a tag")
    return sentences


def standard_library_sentences(max_characters: int = 2_000_000) -> list[Sentence]:
    """Tag the lines of the standard library's source; see `standard_library_sources`."""
    sentences: list[Sentence] = []
    for name, source in standard_library_sources(max_characters).items():
        try:
            sentences += python_sentences(source, name)
        except DataError:
            # Some files are not valid Python of this version: templates and tests.
            continue
    return sentences


def python_sentences(source: str, name: str = "the text") -> list[Sentence]:
    """Tag the tokens of Python source, a sentence per line; `name` is for messages.

    The word of a token over several lines, such as a long string, is its first line.

    Raises:
        DataError: the text is not Python; the message names the line.
    """
    sentences: list[Sentence] = []
    rows: list[tuple[str, str, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            tag = _python_tag(token)
            word = token.string.strip().split("\n")[0]
            if token.type == tokenize.ERRORTOKEN and word:
                raise DataError(f"{name}:{token.start[0]}: not Python: {word!r}")
            if tag is not None and word:
                rows.append((word, tag, f"{name}:{token.start[0]}"))
            if token.type in _LINE_ENDS and rows:
                sentences.append(_sentence(rows))
                rows = []
    except (tokenize.TokenError, SyntaxError) as error:
        line = (error.lineno or 1) if isinstance(error, SyntaxError) else error.args[1][0]
        raise DataError(f"{name}:{line}: not Python: {error.args[0]}") from None
    return sentences + ([_sentence(rows)] if rows else [])


def split_words(text: str, name: str, *, python: bool) -> list[tuple[str, ...]]:
    """Split each non-empty line of a text into words.

    python: words are Python's tokens; else the text is split at white space.
    """
    if python:
        return [sentence.words for sentence in python_sentences(text, name)]
    return [words for line in text.split("\n") if (words := tuple(line.split()))]


def _python_tag(token: tokenize.TokenInfo) -> str | None:
    """Get the tag of a token; None for line breaks and indentation."""
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "name"
    kind = tokenize.tok_name[token.type]
    # f-strings are split into FSTRING_START and so on from Python 3.12 on, t-strings from 3.14.
    return "string" if "STRING" in kind else _PYTHON_TAGS.get(kind)


def _sentence(rows: list[tuple[str, str, str]]) -> Sentence:
    words, tags, places = zip(*rows, strict=True)
    return Sentence(words, tags, places)


def tags_of(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """List all tags in alphabetical order."""
    return tuple(sorted({tag for sentence in sentences for tag in sentence.tags}))


def check_tags(sentences: Iterable[Sentence], allowed: Iterable[str]) -> None:
    """Check that all tags are allowed."""
    allowed = tuple(allowed)
    for sentence in sentences:
        for tag, place in zip(sentence.tags, sentence.places, strict=True):
            if tag not in allowed:
                raise DataError(f"{place}: unknown tag {tag!r}; the run's are {', '.join(allowed)}")


def sentences_fingerprint(sentences: Iterable[Sentence]) -> str:
    """Compute the SHA-256 of words and tags, in hexadecimal."""
    tagged = (zip(sentence.words, sentence.tags, strict=True) for sentence in sentences)
    texts = ("".join(f"{word}\t{tag}\n" for word, tag in pairs) for pairs in tagged)
    return fingerprint("\n".join(texts))
