"""Tables of figures that were measured outside a full run: the files of bench/results/probes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import table

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


def tables(folder: Path) -> list[str]:
    """The section of each JSON file of the folder, as Markdown, in the order of their names."""
    return [_section(path) for path in sorted(folder.glob("*.json"))]


def ran(folder: Path) -> list[tuple[str, str]]:
    """Compute capability, and GPU and date, of each file."""
    files = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return [(data["capability"], f"{data['gpu'].split(',')[0]}, {data['date']}") for data in files]


def _section(path: Path) -> str:
    data = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    commits = "\n".join(
        f"- {call['commit']}: {call['what']}. Numeric tests: {call['tests']}."
        for call in data["calls"]
    )
    rows = [row for call in data["calls"] for row in call["rows"]]
    parts = [
        f"## {data['gpu']}, {data['date']}",
        f"From [probes/{path.name}](probes/{path.name}); {versions}. {data['method']}",
        f"The file has all rows, call by call; of a case that ran twice the tables have the last "
        f"run. By commit:\n\n{commits}",
        _limits(rows),
        "TFLOP/s of attention, bf16:\n\n" + _attention(rows),
        "Options of the portable kernels, B 4, H 16, T 4096, causal, in ms:\n\n" + _options(rows),
        "Decoding a token, 32 heads on 8, D 128, as a CUDA graph:\n\n" + _decoding(rows),
        "Tiles of the portable forward (None: the one in use then) and shapes of the Hopper "
        "backward (BLOCK, STAGES), in ms of the whole call:\n\n" + _tiles(rows),
    ]
    return "\n\n".join(parts)


def _limits(rows: list[Row]) -> str:
    found = {row["job"]: row for row in rows if row.get("job") in ("matmul", "copy")}
    return (
        f"Limits of this GPU in the same way: a product of 8192 x 8192 x 8192 in bf16 "
        f"{found['matmul']['tflops']:.0f} TFLOP/s, a copy {found['copy']['gbps']:.0f} GB/s."
    )


def _attention(rows: list[Row]) -> str:
    cases: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row.get("job") in ("fwd", "bwd") and row["name"] in _NAMES:
            mask = "causal" if row["causal"] else "full"
            case = (_KINDS["fwd"] if row["job"] == "fwd" else "backward", mask)
            sizes = tuple(row[name] for name in ("B", "H", "T", "D"))
            cases.setdefault((*case, *sizes), {})[row["name"]] = row["tflops"]
    ordered = sorted(cases, key=lambda c: (c[5], c[4], c[0], c[1]))
    lines = (
        (*case, *(f"{cases[case][n]:.0f}" if n in cases[case] else "" for n in _NAMES))
        for case in ordered
        if len(cases[case]) > 1
    )
    return table(("pass", "mask", "B", "H", "T", "D", *_NAMES.values()), lines)


def _options(rows: list[Row]) -> str:
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        if row.get("job") in ("fwd", "bwd") and row["name"].startswith("triton-") and row["B"] == 4:
            found.setdefault(row["name"][7:], {})[row["job"], row["D"]] = row["ms"]
        if row.get("job") == "feature" and not row["tag"]:
            times = found.setdefault(row["name"], {})
            times |= {(job, row["D"]): row[f"{job}_ms"] for job in ("fwd", "bwd")}
    keys = [(job, D) for D in (64, 128) for job in ("fwd", "bwd")]
    head = ["option", *(f"{_KINDS['fwd'] if j == 'fwd' else 'backward'}, D {D}" for j, D in keys)]
    lines = ((name, *(f"{ms[key]:.2f}" for key in keys)) for name, ms in found.items())
    return table(head, lines)


def _decoding(rows: list[Row]) -> str:
    def lines() -> Iterator[tuple[object, ...]]:
        for row in rows:
            if row.get("job") == "decode" and row.get("H", 32) == 32 and "ms" in row:
                who = "fastattn" if "kind" in row else _NAMES[row["name"]]
                note = row["name"] if row["name"] in ("ragged", "page64", "d64", "mha") else ""
                cache = " ".join(filter(None, (row.get("kind", "dense"), note)))
                yield who, cache, row["B"], row["T"], f"{row['ms']:.4f}", f"{row['gbps']:.0f}"

    return table(("", "cache", "B", "T", "ms", "GB/s"), lines())


def _tiles(rows: list[Row]) -> str:
    pairs: dict[tuple[str, int, str], dict[bool, float]] = {}
    for row in rows:
        if row.get("job") == "tiles" and "ms" in row:
            key = (_KINDS[row["kind"]], row["D"], row["what"].removeprefix("TileConfig"))
            pairs.setdefault(key, {})[row["causal"]] = row["ms"]
    lines = ((*key, f"{ms[True]:.3f}", f"{ms[False]:.3f}") for key, ms in pairs.items())
    return table(("kernel", "D", "tile", "causal", "full"), lines)
