"""Files of the tuning tables in kernels/launch/tuning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig
from ...tuned.findings import Findings
from ..results.report import write_whole

FOLDER = Path(tiles.__file__).parent / "tuning"
TILE = tuple(field.name for field in fields(TileConfig))


def ship(stored: Findings, folder: Path = FOLDER) -> Iterator[Path]:
    """Put stored tiles of `fastattn tune` into the tables of a folder; return the written files.

    Excludes tiles of a GPU that uses another GPU's table, and shapes of the Hopper kernels, which
    are in `kernels.hopper.tile_table`.
    """
    made: dict[str, list[dict[str, Any]]] = {}
    for row in stored.rows.get("tiles", ()):
        if row["kernel"] not in tiles.HOPPER and row["arch"] in tiles.TABLES:
            made.setdefault(row["arch"], []).append(_shipped(row, stored))
    for name, rows in made.items():
        path = folder / f"{name}.json"
        write_whole(path, _merged(json.loads(path.read_text("utf-8")), rows))
        yield path


def _shipped(row: Mapping[str, Any], stored: Findings) -> dict[str, Any]:
    """A finding as a row of a table."""
    calls = "" if row["calls"] == "plain" else f"_{row['calls']}"
    kept = {name: row[name] for name in ("element_size", "BLOCK_D", *TILE)}
    ms = {name: row[name] for name in ("ms", "ms_full") if name in row}
    about = {name: getattr(stored.environment, name) for name in ("gpu", "torch", "triton")}
    about |= {"date": row["date"], "command": "fastattn tune"}
    return {"kernel": row["kernel"] + calls, **kept, "source": "measured", **ms, **about}


def _merged(table: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a table, one line per row; new rows replace rows of the same key."""

    def entry(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["kernel"], row["element_size"], row["BLOCK_D"]

    fresh = {entry(row): dict(row) for row in rows}
    kept = [fresh.pop(entry(row), row) for row in table["rows"]]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in [*kept, *fresh.values()])
    rest = {name: value for name, value in table.items() if name != "rows"}
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in rest.items())
    return f'{{\n{head}  "rows": [\n{lines}\n  ]\n}}\n'
