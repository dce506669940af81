"""Pairs of texts to translate: TSV files, docstrings with names of functions, dates in words."""

from __future__ import annotations

import ast
import datetime
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .text import DataError, fingerprint, read_lines, standard_library_sources

_YEARS = range(1950, 2050)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_FIRST = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"},
    **{"nine": "ninth", "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"},
}
_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y")
_LONGEST_SUMMARY = 80  # characters; longer first lines of docstrings are often no sentence


@dataclass(frozen=True)
class Pair:
    """A text and its translation, neither empty, with its place, "FILE:LINE"."""

    source: str
    target: str
    place: str


def read_pairs(paths: Iterable[str | Path]) -> list[Pair]:
    """Read UTF-8 TSV files: source, tab, target.

    Raises:
        DataError: a file is unreadable or empty, or a line is no pair; the message names the line.
    """
    return [pair for path in paths for pair in _pairs_of(Path(path))]


def _pairs_of(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}:{number}"
        if not line.strip():
            raise DataError(f"{place}: the line is empty, source TAB target is expected")
        parts = line.split("\t")
        if len(parts) != 2:
            raise DataError(
                f"{place}: source TAB target is expected, got {len(parts) - 1} tabulators"
            )
        for side, text in zip(("source", "target"), parts, strict=True):
            if not text.strip():
                raise DataError(f"{place}: the pair has no {side}")
        yield Pair(parts[0].strip(), parts[1].strip(), place)


def standard_library_pairs(max_characters: int = 6_000_000) -> list[Pair]:
    """Collect pairs of docstring and function name from the standard library.

    The source is a docstring's first line, the target the name with spaces for underscores:
    "Return the current time." and "time now". Each pair comes once; see `standard_library_sources`.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    for name, source in standard_library_sources(max_characters).items():
        for pair in _docstrings(source, name):
            pairs.setdefault((pair.source, pair.target), pair)
    return list(pairs.values())


def date_pairs() -> list[Pair]:
    """Write every day from 1950 to 2049 in digits (one of three forms) and in words.

    "2026-11-21", "21.11.2026" or "11/21/2026" and "twenty-first of November twenty twenty-six". A
    hash chooses order and form, so that every part is of the same mix.
    """
    pairs: dict[bytes, Pair] = {}
    for year in _YEARS:
        day = datetime.date(year, 1, 1)
        while day.year == year:
            digest = hashlib.sha256(day.isoformat().encode()).digest()
            source = day.strftime(_FORMATS[digest[0] % len(_FORMATS)])
            pairs[digest] = Pair(source, date_in_words(day), day.isoformat())
            day += datetime.timedelta(days=1)
    return [pairs[digest] for digest in sorted(pairs)]


def date_in_words(day: datetime.date) -> str:
    """Write a date from 1100 to 9999 in English words: "first of May two thousand one"."""
    head, dash, last = _number(day.day).rpartition("-")
    ordinal = f"{head}{dash}{_FIRST.get(last, f'{last}th')}"
    return f"{ordinal} of {_MONTHS[day.month - 1]} {_year(day.year)}"


def _number(value: int) -> str:
    """Write a number below 100 in words."""
    if value < len(_ONES):
        return _ONES[value]
    tens, ones = divmod(value, 10)
    return f"{_TENS[tens]}-{_ONES[ones]}" if ones else _TENS[tens]


def _year(value: int) -> str:
    centuries, rest = divmod(value, 100)
    if rest == 0 and centuries % 10:
        return f"{_number(centuries)} hundred"
    if centuries % 10 == 0 and rest < 10:
        thousands = f"{_number(centuries // 10)} thousand"
        return f"{thousands} {_number(rest)}" if rest else thousands
    return f"{_number(centuries)} {'oh ' if rest < 10 else ''}{_number(rest)}"


def _docstrings(source: str, name: str) -> Iterator[Pair]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
        words = " ".join(node.name.lower().split("_")).split()
        if summary and words and len(summary) <= _LONGEST_SUMMARY and "\t" not in summary:
            yield Pair(summary, " ".join(words), f"{name}:{node.lineno}")


def pairs_fingerprint(pairs: Iterable[Pair]) -> str:
    """Compute the SHA-256 of all pairs, in hexadecimal."""
    return fingerprint("\n".join(f"{pair.source}\t{pair.target}" for pair in pairs))
