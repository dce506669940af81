"""JSON file of results: environment, and rows by kind, each a line with its date."""

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from ..files.replace import replacing
from .environment import Environment

FORMAT = 1
# The key fields of each kind; a key has one row.
KEYS = {
    "verification": ("backend", "family", "dtype", "head_dim"),
    "tiles": ("kernel", "calls", "element_size", "BLOCK_D"),
    "backends": ("direction", "dtype", "head_dim", "causal", "waves"),
    "passes": ("backend", "dtype", "head_dim"),
    "splits": ("element_size", "BLOCK_D"),
}
# Further fields that calls read.
_READ = {
    "verification": ("verdict", "date"),
    "tiles": ("date",),
    "backends": ("backend", "date"),
    "passes": ("passes", "date"),
    "splits": ("programs", "date"),
}
# Levels of nesting in a row, itself included.
_DEEPEST = 4
Record = dict[str, Any]


class Findings(NamedTuple):
    """Contents of a file of results. rows: by kind, a key of KEYS."""

    environment: Environment
    rows: dict[str, list[Record]]


class Unreadable(ValueError):
    """Error: a file has no results, is damaged or has another format."""


def check_kind(kind: str) -> str:
    """Return the kind if it exists."""
    if kind not in KEYS:
        raise ValueError(f"kind must be one of {', '.join(KEYS)}, got {kind!r}")
    return kind


def dated(kind: str, row: Mapping[str, Any]) -> Record:
    """Date a row today, unless it has a date."""
    row = {**row, "date": row.get("date") or str(datetime.now(timezone.utc).date())}
    _check_row(kind, row)
    return row


def merged(kind: str, *rows: Record) -> list[Record]:
    """Merge rows; of several with one key, keep the last."""
    return list({tuple(row[field] for field in KEYS[kind]): row for row in rows}.values())


def write(path: Path, findings: Findings) -> None:
    """Write a file atomically: a killed process leaves the earlier file."""
    kinds = []
    for kind, rows in findings.rows.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        kinds.append(f'  "{kind}": [\n{lines}\n  ]')
    head = [
        f'  "format": {FORMAT}',
        f'  "environment": {json.dumps(findings.environment._asdict(), indent=4)[:-1]}  }}',
    ]
    with replacing(path) as file:
        file.write("{\n" + ",\n".join(head + kinds) + "\n}\n")


def read(path: Path) -> Findings:
    """Read a file of findings.

    Raises:
        Unreadable: the file has another format.
        OSError: the file is missing or may not be read.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != FORMAT:
            raise Unreadable(f"its format is {content['format']}, and this fastattn reads {FORMAT}")
        environment = Environment(**content["environment"])
        if not all(isinstance(value, str | int) for value in environment):
            raise ValueError("its environment has a field that is no text or number")
        rows = {kind: content[kind] for kind in KEYS if kind in content}
        for kind, of_kind in rows.items():
            for row in of_kind:
                _check_row(kind, row)
    except Unreadable:
        raise
    # RecursionError: brackets nested too deeply.
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(f"it is damaged, or no file of results: {error!r}") from error
    return Findings(environment, rows)


def _check_row(kind: str, row: Any) -> None:
    key = KEYS[check_kind(kind)]
    if _deeper(row, _DEEPEST):
        raise ValueError(f"a row of {kind} has more than {_DEEPEST} levels")
    missing = [field for field in (*key, *_READ[kind]) if field not in row]
    if missing:
        raise ValueError(f"a row of {kind} lacks {', '.join(missing)}: {row}")
    if not all(isinstance(row[field], str | int) for field in key):
        raise ValueError(f"a row of {kind} has a key that is no text or number: {row}")


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than some levels."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(x, levels - 1) for x in inner)
