"""The verdicts that ship with the package, drawn from the findings in bench/results/tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...tuned import findings, shipped
from ...tuned.families import UNPROVEN
from ...tuned.findings import KEYS, Record
from .report import load

FILE = Path(shipped.__file__).with_name("verdicts.json")
_RIGHT = "right"


def text(folder: Path) -> str:
    """The text of verdicts.json for a folder of results: the newest row of each key.

    A row's commit is its own, or that of the report beside it, which has the same name.
    """
    rows: dict[tuple[Any, ...], Record] = {}
    for path in sorted((folder / "tuned").glob("*.json")):
        environment, kinds = findings.read(path)
        beside = folder / path.name
        of_report = load(beside)["environment"].get("commit") if beside.exists() else None
        for row in kinds.get("verification", ()):
            key = tuple(row[field] for field in KEYS["verification"])
            if row["backend"] in UNPROVEN and row["date"] >= rows.get(key, row)["date"]:
                names = [*KEYS["verification"], "verdict", "date"]
                names += [] if row["verdict"] == _RIGHT else ["case", "reason"]
                commit = (row.get("commit") or of_report or "")[:7]
                about = {"gpu": environment.gpu, "commit": commit, "code": row.get("code", "")}
                rows[key] = {**{name: row[name] for name in names}, **about}
    lines = (json.dumps(rows[key]) for key in sorted(rows))
    return '{"rows": [\n' + ",\n".join(lines) + "\n]}\n"
