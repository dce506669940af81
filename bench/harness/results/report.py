"""The report of a run as a JSON file, and merged records of several reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...files.replace import replacing
from ..time.environment import SOURCES, fingerprints
from ..time.failures import TIMED

FORMAT = 1
DONE, BROKEN, LEFT = "done", "broken off", "not reached"
Record = dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    """Read a report.

    Results are measurements; jobs, their status and reason; broken, how kinds of jobs ended a
    process (see `measure`); tests, counts or runs; commits, seven digits to a date in UTC.

    Raises:
        ValueError: the file is not a report of this format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a benchmark report of format {FORMAT}")
    return data


def empty(command: str) -> dict[str, Any]:
    """A new report."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    parts: dict[str, Any] = {name: {} for name in ("environment", "ceilings", "tests", "jobs")}
    about = {"format": FORMAT, "command": command, "started": started}
    return {**about, **parts, "results": [], "broken": {}}


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by a report atomically, with one line per record."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, allow_nan=False)
        if value and isinstance(value, list):
            text = "[\n " + ",\n ".join(json.dumps(x, allow_nan=False) for x in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text)


def number(figure: float) -> str:
    """A figure to three digits, above 100 to the unit."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def timed(results: Iterable[Record]) -> Iterator[Record]:
    """The records with a time."""
    return (record for record in results if record["status"] == TIMED)


def group_of(record: Mapping[str, Any]) -> str | None:
    """The group of our kernels that a record timed, or None."""
    name, family = record["implementation"], record["case"]["family"]
    if not name.startswith("fastattn") or name == "fastattn-torch":
        return None
    if "hopper" in name:
        return "hopper"
    return family if family in SOURCES and name != "fastattn" else "all"


def gpu_of(data: Mapping[str, Any]) -> str:
    """The name of a report's GPU."""
    return str((data["environment"].get("gpu") or {"name": "no GPU"})["name"])


def commit_of(data: Mapping[str, Any], commit: str | None = None) -> tuple[str, str]:
    """Get a commit's seven digits or "", by default the whole report's, and its date.

    The dates order figures and tests: those in the report's `commits`, else its start.
    """
    digits = (commit or data["environment"].get("commit") or "")[:7]
    return digits, data.get("commits", {}).get(digits, data["started"])


def ordered(reports: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Records of several reports: timed ones last, and of those the ones of the newest commit.

    Each gets its commit, the date of that, its run (equal for figures of one commit in a report),
    and stale: whether its kernels may have changed since.
    """
    every: list[Record] = []
    for data in sorted(reports, key=lambda data: str(data["started"])):
        sources = data["environment"].get("kernels", {})
        for record in data["results"]:
            group = group_of(record)
            commit, date = commit_of(data, record.get("commit"))
            stale = group is not None and sources.get(group) != fingerprints()[group]
            about = {"commit": commit, "date": date, "run": f"{data['started']} {commit}"}
            every.append({**record, **about, "stale": stale})
    return sorted(every, key=lambda record: (record["status"] == TIMED, record["date"]))


def newest(reports: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The last of the ordered records of each case and implementation."""
    return list({(x["case"]["name"], x["implementation"]): x for x in ordered(reports)}.values())
