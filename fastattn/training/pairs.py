"""Pairs of texts to translate: TSV files, and docstrings with the names of their functions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .data import DataError, fingerprint, read_text_file, standard_library_sources

_LONGEST_SUMMARY = 80  # characters; a docstring's first line that is longer is often no sentence


@dataclass(frozen=True)
class Pair:
    """A text and what it is in the other language.

    Args:
        source, target: not empty.
        place: where it stands, "FILE:LINE".
    """

    source: str
    target: str
    place: str


def read_pairs(paths: Iterable[str | Path]) -> list[Pair]:
    """Reads UTF-8 files of a pair a line: source, a tabulator, target.

    Raises:
        DataError: a file is unreadable or empty, or a line is not such a pair; the message names
            the line.
    """
    return [pair for path in paths for pair in _pairs_of(Path(path))]


def _pairs_of(path: Path) -> Iterator[Pair]:
    lines = read_text_file(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        if not line.strip():
            raise DataError(f"{place}: the line is empty, source TAB target is expected")
        parts = line.rstrip("\r").split("\t")
        if len(parts) != 2:
            raise DataError(
                f"{place}: source TAB target is expected, got {len(parts) - 1} tabulators"
            )
        for side, text in zip(("source", "target"), parts, strict=True):
            if not text.strip():
                raise DataError(f"{place}: the pair has no {side}")
        yield Pair(parts[0].strip(), parts[1].strip(), place)


def standard_library_pairs(max_characters: int = 6_000_000) -> list[Pair]:
    """Docstrings of the standard library's functions, each with the words of its function's name.

    The source is a docstring's first line, the target the name with spaces for underscores:
    "Return the current time." and "time now". Each pair comes once; see `standard_library_sources`.

    Raises:
        DataError: the installation has no source files.
    """
    found: dict[tuple[str, str], Pair] = {}
    for name, source in standard_library_sources(max_characters).items():
        for pair in _docstrings(source, name):
            found.setdefault((pair.source, pair.target), pair)
    return list(found.values())


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
    """SHA-256 of all pairs, in hexadecimal."""
    return fingerprint("\n".join(f"{pair.source}\t{pair.target}" for pair in pairs))
