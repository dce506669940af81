"""Tuning tables as files: rows put in place, and the text that kernels/launch/tuning keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig

FOLDER = Path(tiles.__file__).parent / "tuning"
SIZES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
Rows = list[dict[str, Any]]
_TILE = tuple(field.name for field in fields(TileConfig))


def read(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The shipped table tuning/<name>.json: its device and rows."""
    table: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return table


def merge(table: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A table with rows in place of those for the same kernel, element size and D."""

    def entry(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["kernel"], row["element_size"], row["BLOCK_D"]

    fresh = {entry(row): dict(row) for row in rows}
    kept = [fresh.pop(entry(row), row) for row in table["rows"]]
    return {**table, "rows": [*kept, *fresh.values()]}


def text(table: Mapping[str, Any]) -> str:
    """A table as the files in kernels/launch/tuning hold it: one row a line."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    rest = {name: value for name, value in table.items() if name != "rows"}
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in rest.items())
    return f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'


def to_ship(
    found: Iterable[Mapping[str, Any]], gpu: str, versions: Mapping[str, str]
) -> dict[str, Rows]:
    """Rows of tables, by the table's name, of the "tiles" that `fastattn tune` stored.

    Those of a GPU whose table is another's are left out, and shapes of the Hopper kernels, which
    stand in `kernels.hopper.tile_table`.

    Args:
        found: rows as `fastattn.tuned` keeps them.
        gpu: its name.
        versions: of torch and triton.
    """
    made: dict[str, Rows] = {}
    for row in found:
        if row["kernel"] in tiles.HOPPER or row["arch"] not in tiles.TABLES:
            continue
        calls = "" if row["calls"] == "plain" else f"_{row['calls']}"
        full = {"ms_full": row["ms_full"]} if "ms_full" in row else {}
        made.setdefault(row["arch"], []).append(
            {
                "kernel": row["kernel"] + calls,
                "element_size": row["element_size"],
                "BLOCK_D": row["BLOCK_D"],
                **{name: row[name] for name in _TILE},
                "source": "measured",
                "ms": row["ms"],
                **full,
                "gpu": gpu,
                "torch": versions["torch"],
                "triton": versions["triton"],
                "date": row["date"],
                "command": "fastattn tune",
            }
        )
    return made
