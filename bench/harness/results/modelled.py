"""The file of modelled bounds, and what the page of results says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

from .bounds import GHZ, MULTIPROCESSORS, TARGET, TERABYTES, rows_of
from .decode_bounds import CACHES, row_of
from .report import table


def write(path: Path) -> None:
    """The bounds of all head dims and caches as JSON, with the version of Triton."""
    head = f'"target": "{TARGET}", "triton": "{triton.__version__}", "ghz": {GHZ}'
    rows = _lines(row for D in (64, 128, 256) for row in rows_of(D))
    decoding = _lines(map(row_of, CACHES))
    text = f'{{{head}, "rows": [\n{rows}\n], "decode": [\n{decoding}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(map(json.dumps, rows))


def section(folder: Path) -> list[str]:
    """The bounds of modelled/sm_90.json as Markdown; nothing without the file."""
    path = folder / "modelled" / f"{TARGET}.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    return [
        "## Modelled, not measured",
        f"What `fastattn.testing.compiling.speed` makes of the machine code of the shipped kernels "
        f"for {data['target']} (Triton {data['triton']}, bf16, full blocks without a mask; written "
        f"by `python bench/model.py`): clocks of a multiprocessor for a pair of query and key on "
        f"each unit, the bound if one hides behind the other, and what that is in TFLOP/s of the "
        f"products that the kernel makes, on {MULTIPROCESSORS} multiprocessors at {data['ghz']} "
        f"GHz. A backward in two passes makes seven products (dq three, dkv four; dv and dk apart "
        f"two and three), of which the tables of measurements count five. In 8 bits (forward_fp8) "
        f"products take half the time of 16. Instructions that a pass jumps over count: D / 2 in "
        f"most blocks of Hopper's forward of 16.",
        _table(data["rows"]),
        f"Decoding, a token of 32 heads beside 8 of a cache: clocks for a key of a head, those "
        f"that its bytes take of a memory of {TERABYTES} TB/s, and the TB/s of keys, values and "
        f"scales that the slowest leaves.",
        _table(data["decode"]),
    ]


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    cells = (["" if row[name] is None else row[name] for name in names] for row in rows)
    return table(names, cells)
