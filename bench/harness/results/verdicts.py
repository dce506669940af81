"""The verdicts that ship with the package, drawn from the files of bench/results.

A family ran right where `fastattn verify` says so, where tests that a report names passed, and
where it was timed: its results were first held to the error budget, or compared with torch's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ...tuned import findings, shipped
from ...tuned.families import UNPROVEN, head_dim_class, sources
from ...tuned.findings import KEYS, Record
from .report import load, timed

FILE = Path(shipped.__file__).with_name("verdicts.json")
_DIRECTIONS = {
    "fastattn-hopper": "",  # the case's
    "fastattn-hopper-one-pass": "one-pass",
    "fastattn-hopper-fp8": "fp8",
    "fastattn-hopper-fp8-packed": "fp8",
}
# The largest norm of a difference from torch's results, over the norm of these, in bf16.
_CLOSE = 0.005
_RIGHT = "right"


def text(folder: Path) -> str:
    """The text of verdicts.json for a folder of reports and findings."""
    rows: dict[tuple[Any, ...], Record] = {}
    every = [*_of_reports(folder), *_of_findings(folder)]
    for row in sorted(every, key=lambda row: str(row["date"])):
        key = tuple(row[field] for field in KEYS["verification"])
        old = rows.get(key, row)
        # A timing at one size lifts no verdict on all of them.
        if old["verdict"] == _RIGHT or row["verified"]:
            rows[key] = row
    for row in rows.values():
        del row["verified"]
    lines = (json.dumps(rows[key]) for key in sorted(rows))
    return '{"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def _of_reports(folder: Path) -> Iterator[Record]:
    for data in sorted(map(load, folder.glob("*.json")), key=lambda data: str(data["started"])):
        environment = data["environment"]
        about = {"gpu": environment["gpu"]["name"], "date": data["started"][:10]}
        tests = data["tests"] if isinstance(data["tests"], list) else []
        for run in (x for x in tests if "right" in x):
            for rows in run["right"]["rows"]:
                named = _with_options(rows["families"], rows["options"])
                for family, dtype, D in product(named, rows["dtypes"], rows["head_dims"]):
                    yield _row(family, dtype, D, {}, {**about, "commit": run["commit"]})
        for record in timed(data["results"]):
            commit = (record.get("commit") or environment.get("commit") or "")[:7]
            for family in _timed_right(record):
                case = record["case"]
                code = environment.get("kernels", {})
                yield _row(family, case["dtype"], case["D"], code, {**about, "commit": commit})


def _timed_right(record: Mapping[str, Any]) -> Iterable[str]:
    """Families that a record's measurement shows to run right."""
    case = record["case"]
    direction = _DIRECTIONS.get(record["implementation"])
    # Records of probes without a comparison; few queries; an option without a place in the case.
    if direction is None or "B" not in case or case["family"] == "decode" or case.get("option"):
        return ()
    if record.get("rel", 0.0) > _CLOSE:
        return ()
    backward = ("forward", "backward") if case["direction"] == "backward" else ("forward",)
    padding = "key_padding_mask" if case.get("padding_side") == "left" else "key_lengths"
    options = {"window": case["window"], padding: case["lengths"]}
    options["head_dim"] = case["D"] != head_dim_class(case["D"])
    used = [name for name, value in options.items() if value]
    return _with_options((direction,) if direction else backward, used)


def _with_options(directions: Iterable[str], options: Iterable[str]) -> list[str]:
    endings = ("", *(f"+{option}" for option in options))
    return [direction + ending for direction in directions for ending in endings]


def _row(
    family: str, dtype: str, D: int, code: Mapping[str, str], about: Mapping[str, Any]
) -> Record:
    named = {"backend": "hopper", "family": family, "dtype": dtype, "head_dim": head_dim_class(D)}
    of_code = code.get(sources("hopper", family), "")
    return {**named, "verdict": _RIGHT, **about, "code": of_code, "verified": False}


def _of_findings(folder: Path) -> Iterator[Record]:
    for path in sorted((folder / "tuned").glob("*.json")):
        environment, rows = findings.read(path)
        beside = folder / path.name
        commit = load(beside)["environment"].get("commit") if beside.exists() else None
        about = {"gpu": environment.gpu, "commit": (commit or "")[:7]}
        for row in rows.get("verification", ()):
            if row["backend"] in UNPROVEN:
                names = [*KEYS["verification"], "verdict", "date"]
                names += [] if row["verdict"] == _RIGHT else ["case", "reason"]
                kept = {name: row[name] for name in names}
                yield {**kept, **about, "code": row.get("code", ""), "verified": True}
