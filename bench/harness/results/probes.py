"""Tables of figures that were measured outside a full run: the files of bench/results/probes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .report import pivot, table

Row = dict[str, Any]
_NAMES = {
    "triton": "fastattn triton",
    "one-pass": "triton, one pass",
    "hopper": "fastattn hopper",
    "hopper-one-pass": "hopper, one pass",
    "flash2": "torch flash",
    "cudnn": "torch cuDNN",
}
_KINDS = {
    "fwd": "forward",
    "dq": "backward, dQ",
    "dkv": "backward, dK/dV",
    "one_pass": "backward in one pass",
}
_PASS = {"fwd": "forward", "bwd": "backward"}


def read(folder: Path) -> dict[str, Any]:
    """The JSON files of the folder by name, in the order of their names."""
    return {
        p.name: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))
    }


def ran(data: dict[str, Any]) -> tuple[str, str]:
    """Compute capability, and GPU and date, of a file."""
    return data["capability"], f"{data['gpu'].split(',')[0]}, {data['date']}"


def section(name: str, data: dict[str, Any]) -> str:
    """The section of a file as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    commits = "\n".join(
        f"- {call['commit']}: {call['what']}. Numeric tests: {call['tests']}."
        for call in data["calls"]
    )
    rows = [row for call in data["calls"] for row in call["rows"]]
    limits = {row["job"]: row for row in rows if row.get("job") in ("matmul", "copy")}
    parts = [
        f"## {data['gpu']}, {data['date']}",
        f"From [probes/{name}](probes/{name}); {versions}. {data['method']}",
        f"The file has all rows, call by call; of a case that ran twice the tables have the last "
        f"run. By commit:\n\n{commits}",
        f"Limits of this GPU in the same way: a product of 8192 x 8192 x 8192 in bf16 "
        f"{limits['matmul']['tflops']:.0f} TFLOP/s, a copy {limits['copy']['gbps']:.0f} GB/s.",
        "TFLOP/s of attention, bf16:\n\n" + _attention(rows),
        "Options of the portable kernels, B 4, H 16, T 4096, causal, in ms:\n\n" + _options(rows),
        "Decoding a token, 32 heads on 8, D 128, as a CUDA graph:\n\n" + _decoding(rows),
        "Tiles of the portable forward (None: the one in use then) and shapes of the Hopper "
        "backward (BLOCK, STAGES), in ms of the whole call:\n\n" + _tiles(rows),
    ]
    return "\n\n".join(parts)


def _attention(rows: list[Row]) -> str:
    masked = (row | {"mask": "causal" if row.get("causal") else "full"} for row in rows)
    cells = [
        (
            (_PASS[row["job"]], *(row[key] for key in ("mask", "B", "H", "T", "D"))),
            row["name"],
            f"{row['tflops']:.0f}",
        )
        for row in masked
        if row.get("job") in _PASS and row["name"] in _NAMES
    ]
    compared = {case for case, name, _ in cells if name != cells[0][1]}
    cells = [cell for cell in cells if cell[0] in compared]
    cells.sort(key=lambda cell: (cell[0][5], cell[0][4], cell[0][0], cell[0][1]))
    return pivot(("pass", "mask", "B", "H", "T", "D"), cells, _NAMES)


def _options(rows: list[Row]) -> str:
    found: list[tuple[str, str, int, float]] = []
    for row in rows:
        if row.get("job") in _PASS and row["name"].startswith("triton-") and row["B"] == 4:
            found.append((row["name"][7:], row["job"], row["D"], row["ms"]))
        if row.get("job") == "feature" and not row["tag"]:
            found += [(row["name"], job, row["D"], row[f"{job}_ms"]) for job in _PASS]
    names = {f"{job}{D}": f"{_PASS[job]}, D {D}" for D in (64, 128) for job in _PASS}
    cells = (((name,), f"{job}{D}", f"{ms:.2f}") for name, job, D, ms in found)
    return pivot(("option",), cells, names)


def _decoding(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if row.get("job") == "decode" and row.get("H", 32) == 32 and "ms" in row:
            who = "fastattn" if "kind" in row else _NAMES[row["name"]]
            note = row["name"] if row["name"] in ("ragged", "page64", "d64", "mha") else ""
            cache = " ".join(filter(None, (row.get("kind", "dense"), note)))
            lines.append((who, cache, row["B"], row["T"], f"{row['ms']:.4f}", f"{row['gbps']:.0f}"))
    return table(("", "cache", "B", "T", "ms", "GB/s"), lines)


def _tiles(rows: list[Row]) -> str:
    cells = (
        (
            (_KINDS[row["kind"]], row["D"], row["what"].removeprefix("TileConfig")),
            "causal" if row["causal"] else "full",
            f"{row['ms']:.3f}",
        )
        for row in rows
        if row.get("job") == "tiles" and "ms" in row
    )
    return pivot(("kernel", "D", "tile"), cells)
