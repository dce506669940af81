"""Findings of `fastattn tune` on GPUs: the files of bench/results/tuned, as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...tuned import findings
from ...tuned.findings import Findings, Unreadable
from ..tune import tables
from .report import Report, table, write_whole

# Words in the name of a GPU that do not tell it from others.
_OF_MANY = re.compile(r"nvidia|amd|geforce|instinct|radeon|\d+gb|hbm\w+|sxm\d*|pcie", re.I)


def sections(folder: Path) -> list[str]:
    """The section of each JSON file of the folder, as Markdown, in the order of their names."""
    return [_section(path) for path in sorted(folder.glob("*.json"))]


def _section(path: Path) -> str:
    environment, rows = findings.read(path)
    parts = [
        f"## {environment.gpu}: what `fastattn tune` found, {_date(rows)}",
        f"From [tuned/{path.name}](tuned/{path.name}): {environment.multiprocessors} "
        f"multiprocessors, driver {environment.driver}, torch {environment.torch}, Triton "
        f"{environment.triton}. A candidate takes the place of the shipped choice if it saves more "
        "than 3 % of the time in both halves of the samples.",
        *tables_of(rows),
    ]
    return "\n\n".join(parts)


def tables_of(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Tables of findings by kind."""
    made = {
        "Tiles, and shapes of the Hopper kernels; ms causal and full": table(
            ("kernel", "calls", "bytes", "D", "fastest", "ms", "shipped", "saved"),
            map(_tile, rows.get("tiles", ())),
        ),
        "The fastest backend for plain calls": table(
            ("pass", "dtype", "D", "mask", "query tiles", "fastest", "ms"),
            map(_backend, rows.get("backends", ())),
        ),
        "Gradients in one pass with atomics, or in two": table(
            ("backend", "dtype", "D", "fastest", "ms"), map(_passes, rows.get("passes", ()))
        ),
        "Programs of decoding that share a multiprocessor": table(
            ("bytes", "D", "fastest", "ms"), map(_splits, rows.get("splits", ()))
        ),
    }
    # A table without rows has two lines.
    return [f"{title}:\n\n{text}" for title, text in made.items() if text.count("\n") > 1]


def _tile(row: dict[str, Any]) -> Iterator[object]:
    names = ("BLOCK", "STAGES") if row["kernel"] in tiles.HOPPER else tables.SIZES
    extra = [name for name in ("descriptors", "apart", "PING_PONG") if row.get(name)]
    extra += ["3 consumers"] if row.get("CONSUMERS") == 3 else []
    extra += [] if row.get("DQ_BY_TMA", True) else ["threads add"]
    extra += [] if row.get("SLACK", True) else ["no slack"]
    yield from (row["kernel"], row["calls"], row["element_size"], row["BLOCK_D"])
    yield "(" + ", ".join([*(str(row[name]) for name in names), *extra]) + ")"
    for ending in ("", "_shipped"):
        ms = (row.get(f"{name}{ending}") for name in ("ms", "ms_full"))
        yield " / ".join(f"{x:.4g}" for x in ms if x is not None)
    yield f"{100 * row['gain']:.1f} %"


def _backend(row: dict[str, Any]) -> tuple[object, ...]:
    mask = "causal" if row["causal"] else "full"
    key = (row["direction"], row["dtype"], row["head_dim"], mask, row["waves"])
    return (*key, row["backend"], _times(row))


def _passes(row: dict[str, Any]) -> tuple[object, ...]:
    return row["backend"], row["dtype"], row["head_dim"], row["passes"], _times(row)


def _splits(row: dict[str, Any]) -> tuple[object, ...]:
    return row["element_size"], row["BLOCK_D"], row["programs"], _times(row)


def _times(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {ms:.4g}" for name, ms in row["ms"].items())


def _date(rows: dict[str, list[dict[str, Any]]]) -> str:
    return max((row["date"] for of_kind in rows.values() for row in of_kind), default="empty")


def add(path: Path, results: Path, shipped: Path = tables.FOLDER) -> list[Path]:
    """Take in a file of findings, or the report of a run: a copy in `results`, under GPU and date.

    Tiles that were found take the places of those in the tables to ship.

    Args:
        path: what `fastattn tune --export` or `bench/run_all.py` wrote.
        results: the folder of the reports.
        shipped: that of the tables.

    Returns:
        The files that were written.

    Raises:
        ValueError: it is neither, or of no GPU.
    """
    try:
        found = findings.read(path)
    except Unreadable as error:
        return [_add_report(path, results, error)]
    environment, rows = found
    if not rows or environment.gpu == "interpreter":
        raise ValueError(f"{path} has no findings of a GPU")
    copy = results / "tuned" / f"{slug(environment.gpu)}-{_date(rows)}.json"
    copy.parent.mkdir(exist_ok=True)
    findings.write(copy, found)
    return [copy, *_ship(found, shipped)]


def _ship(found: Findings, folder: Path) -> Iterator[Path]:
    environment, rows = found
    versions = {"torch": environment.torch, "triton": environment.triton}
    for name, of_table in tables.to_ship(rows.get("tiles", ()), environment.gpu, versions).items():
        path = folder / f"{name}.json"
        write_whole(path, tables.text(tables.merge(tables.read(name, folder), of_table)))
        yield path


def _add_report(path: Path, results: Path, unreadable: Unreadable) -> Path:
    try:
        data = Report.load(path).data
    except ValueError:
        raise ValueError(f"{path} is neither a report nor findings: {unreadable}") from None
    gpu = data.get("environment", {}).get("gpu")
    if not gpu:
        raise ValueError(f"{path} is a report of no GPU")
    copy = results / f"{slug(gpu['name'])}-{data['started'][:10]}.json"
    Report(copy, data).save()
    return copy


def slug(gpu: str) -> str:
    """A GPU's name for that of a file: "h100" for "NVIDIA H100 80GB HBM3"."""
    words: Iterable[str] = re.findall(r"[a-z0-9]+", _OF_MANY.sub(" ", gpu).lower())
    return "-".join(words)
