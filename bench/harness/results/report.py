"""The report of a run: one JSON file, replaced atomically, and its Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...files.replace import replacing
from ..cases.registry import OURS, TORCH_PEERS
from ..time.attention import TIMED

FORMAT = 1
DONE, RUNNING, BROKEN, LEFT = "done", "running", "broken off", "not reached"


class Report:
    """The results of a run, in memory and in a JSON file.

    `data` holds format, command, started, environment (see `environment.collect`), ceilings, tests,
    jobs (name to status and seconds), results (records of what was measured), and broken (kind of
    job to implementation to how it ended the process, see `jobs.Job`).
    """

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @classmethod
    def at(cls, path: Path, command: str) -> Report:
        """The report of an earlier run, to go on with, or an empty one, saved."""
        if path.exists():
            return cls.load(path)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        empty: dict[str, Any] = {
            "format": FORMAT,
            "command": command,
            "started": started,
            "environment": {},
            "ceilings": {},
            "tests": {},
            "jobs": {},
            "results": [],
            "broken": {},
        }
        report = cls(path, empty)
        report.save()
        return report

    @classmethod
    def load(cls, path: Path) -> Report:
        """A report that was saved before.

        Raises:
            ValueError: the file is not a report of this format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path.name} is not a benchmark report of format {FORMAT}")
        return cls(path, data)

    def save(self) -> None:
        """Replace the file atomically."""
        write_whole(self.path, _as_text(self.data))

    def running(self) -> tuple[str, dict[str, Any]] | None:
        """The job that was running when the report was saved, and its state.

        The state holds blamed (see `jobs.Job`), at (the implementation at work), doing (its phase,
        see `Bench.samples`) and alone (implementations do not take turns).
        """
        for name, job in self.data["jobs"].items():
            if job["status"] == RUNNING:
                return name, job
        return None


def _as_text(data: Mapping[str, Any]) -> str:
    """JSON with one line for each record."""

    def dump(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f" {dump(row)}" for row in value)
            parts.append(f"{dump(key)}: [\n{rows}\n]")
        else:
            parts.append(f"{dump(key)}: {dump(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text)


def markdown(data: Mapping[str, Any]) -> str:
    """A report as Markdown: environment, a table for each family, ratios, what was not measured."""
    blocks = [_heading(data), *_attention_tables(data["results"]), _ratios(data["results"])]
    blocks += [_others(data["results"]), _unmeasured(data)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _heading(data: Mapping[str, Any]) -> str:
    environment = data["environment"]
    gpu = environment.get("gpu") or {}
    versions = environment.get("versions", {})
    lines = [f"### {gpu.get('name', 'no GPU')}, {data['started'][:10]}", ""]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines.append(f"{software}; cuDNN {environment.get('cudnn')}, driver {gpu.get('driver')}.")
    lines.append(f"Command: `{data['command']}`.")
    ceilings = data["ceilings"]
    if ceilings:
        matmul, copy = ceilings["matmul_tflops"], ceilings["copy_gbps"]
        lines.append(
            f"In the same run a bf16 matrix product of size 8192 reached {matmul} TFLOP/s and a "
            f"copy {copy} GB/s, bytes read and written."
        )
    tests = data["tests"]
    if tests:
        outcome = f"{tests.get('passed', 0)} passed, {tests.get('failed', 0)} failed"
        lines.append(f"Numeric tests on this GPU: {outcome} ({tests['status']}).")
    return "\n".join(lines)


def timed(results: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The records that have a time."""
    return (record for record in results if record["status"] == TIMED)


def _attention_tables(results: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each family, a row a case: conventional TFLOP/s, for decoding GB/s."""
    families: dict[str, list[tuple[tuple[str], str, str]]] = {}
    for record in timed(results):
        if "tflops" in record:
            figure = record.get("kv_gbps", record["tflops"])
            shown = f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"
            cell = ((record["case"]["name"],), record["implementation"], shown)
            families.setdefault(record["case"]["family"], []).append(cell)
    for family, cells in families.items():
        unit = "GB/s of keys and values" if family == "decode" else "TFLOP/s"
        yield f"{family}, {unit}:\n\n" + pivot(("case",), cells)


def _ratios(results: list[dict[str, Any]]) -> str:
    """The table of speed-ups of the Triton kernels over torch's fused kernels."""
    ms = {
        (record["case"]["name"], record["implementation"]): record["ms"]["median"]
        for record in timed(results)
        if "tflops" in record
    }
    cells = [
        ((case,), peer, f"{theirs / ms[case, OURS]:.2f}")
        for (case, peer), theirs in ms.items()
        if peer in TORCH_PEERS and (case, OURS) in ms
    ]
    head = f"Speed of {OURS} as a multiple of a peer's, same run:\n\n"
    return head + pivot(("case",), cells, {peer: peer for peer in TORCH_PEERS}) if cells else ""


def _others(results: list[dict[str, Any]]) -> str:
    """Training, layers and host costs, with all of their figures."""
    rows = []
    for record in timed(results):
        if "tflops" in record:
            continue
        skipped = ("case", "implementation", "status", "ms")
        figures = [f"{key} {value}" for key, value in record.items() if key not in skipped]
        if "ms" in record:
            figures.insert(0, f"{record['ms']['median']} ms")
        rows.append([record["case"]["name"], record["implementation"], ", ".join(figures)])
    return table(["measurement", "of", "figures"], rows) if rows else ""


def _unmeasured(data: Mapping[str, Any]) -> str:
    """Measurements without a figure, with reasons; equal reasons share a line."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for record in data["results"]:
        if record["status"] != TIMED:
            key = (record["implementation"], record["status"], record["reason"])
            reasons.setdefault(key, []).append(record["case"]["name"])
    lines = [
        f"- {name}, {status} ({_some(cases)}): {reason}"
        for (name, status, reason), cases in reasons.items()
    ]
    for name, job in data["jobs"].items():
        if job["status"] not in (DONE,):
            lines.append(f"- {name}: {job['status']}. {job.get('reason', '')}".rstrip())
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def pivot(
    columns: Iterable[str],
    cells: Iterable[tuple[tuple[object, ...], str, str]],
    names: Mapping[str, str] | None = None,
) -> str:
    """A Markdown table of (row, column, text); of several cells of one place, the last stays.

    columns: heads of what names a row. names: the other columns and their heads; default those
    that occur, in their order.
    """
    rows: dict[tuple[object, ...], dict[str, str]] = {}
    for row, column, text in cells:
        rows.setdefault(row, {})[column] = text
    shown = names or {column: column for found in rows.values() for column in found}
    lines = ([*row, *(found.get(column, "") for column in shown)] for row, found in rows.items())
    return table([*columns, *shown.values()], lines)


def table(columns: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a "|" in a cell becomes "/"."""
    head = list(columns)
    cells = [head, ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells)
