"""Shipped verdicts on families of kernels, with the code that a GPU ran.

`python bench/results_table.py` makes verdicts.json from bench/results. A verdict whose
code has changed since still holds, and says so.
"""

import json
from functools import cache
from importlib import resources

from .environment import fingerprints
from .families import sources
from .findings import KEYS, Record


@cache
def verdicts() -> dict[tuple[object, ...], Record]:
    """Read the shipped rows, by the key of a verification."""
    text = resources.files(__package__).joinpath("verdicts.json").read_text("utf-8")
    rows: list[Record] = json.loads(text)["rows"]
    return {tuple(row[field] for field in KEYS["verification"]): row for row in rows}


def is_current(row: Record) -> bool:
    """Whether a verdict's code is the current code."""
    return bool(row["code"] == fingerprints()[sources(row["backend"], row["family"])])


def sentence(row: Record) -> str:
    """Describe a shipped verdict."""
    commit = f" at {row['commit']}" if row["commit"] else ""
    what = f"{row['family']} {row['dtype']} {row['head_dim']}"
    ran = f"{what} ran {row['verdict']} on {row['gpu']}{commit} ({row['date']})"
    if row["verdict"] != "right":
        return f"{ran}: {row['case']}: {row['reason']}"
    return ran if is_current(row) else f"{ran}; its code has changed since"
