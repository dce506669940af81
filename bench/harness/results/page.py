"""bench/results/README.md, generated from the JSON reports beside it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ..cases.registry import OURS
from . import probes, tuned
from .report import Report, markdown, table, timed, write_whole

_NOTHING = """## Measured

There is no such file yet. What was measured outside a full run stands below."""


def page(folder: Path) -> str:
    """The text of README.md for the JSON files of a folder.

    notes.md there, if it is, says what stands before the line "<!-- tables -->" and behind it.

    Raises:
        ValueError: a file is not a report.
    """
    reports = [Report.load(path).data for path in sorted(folder.glob("*.json"))]
    probed = probes.read(folder / "probes")
    notes = folder / "notes.md"
    said = notes.read_text(encoding="utf-8") if notes.exists() else "# Results"
    before, _, behind = said.partition("<!-- tables -->")
    parts = [before, "## Measured" if reports else _NOTHING, *map(markdown, reports)]
    parts += tuned.sections(folder / "tuned")
    parts += [probes.section(name, data) for name, data in probed.items()]
    parts += [_verified(reports, list(map(probes.ran, probed.values()))), behind]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _verified(reports: list[dict[str, Any]], probed: list[tuple[str, str]]) -> str:
    """A table of what ran on each architecture with tuned tiles. probed: see `probes.ran`."""
    lines = []
    for arch in tiles.TABLES:
        if arch == "interpreter":
            continue
        gpus = [(data, data["environment"].get("gpu")) for data in reports]
        ran = [(data, gpu["name"]) for data, gpu in gpus if gpu and _of(gpu["capability"]) == arch]
        tests = [(gpu, data["tests"]) for data, gpu in ran if data["tests"]]
        tested = [
            f"{x}: {t['passed']} passed, {t['failed']} failed ({t['status']})" for x, t in tests
        ]
        ours = [
            f"{gpu}, {data['started'][:10]}"
            for data, gpu in ran
            if any(record["implementation"] == OURS for record in timed(data["results"]))
        ]
        parts = [f"{gpu}: in parts, see above" for known, gpu in probed if _of(known) == arch]
        lines.append([arch, *("; ".join([*x, *parts]) or "not run" for x in (tested, ours))])
    columns = ("tiles for", "numeric tests", "kernels timed")
    return "## What has run where\n\n" + table(columns, lines)


def _of(capability: str) -> str:
    """The table of tiles for a compute capability."""
    return tiles.table_for("sm_" + capability.replace(".", ""))


def draw(folder: Path) -> None:
    """Write README.md."""
    write_whole(folder / "README.md", page(folder))


def check(folder: Path) -> str:
    """A diff of README.md and the page of the files, "" if they agree."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(
        text.splitlines(), page(folder).splitlines(), "README.md", "the JSON files", lineterm=""
    )
    return "\n".join(lines)
