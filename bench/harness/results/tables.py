"""Markdown tables of reports and findings, and bench/results/README.md."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...tuned import findings
from ...tuned.findings import Unreadable
from ..cases.registry import BY_DEFAULT, OURS, PORTABLE, TORCH_PEERS
from ..time.failures import UNSERVED
from ..tune import tables as tuning
from .report import Record, commit_of, gpu_of, load, newest, number, ordered, save, timed

Rows = dict[str, dict[str, str]]  # by case and column

_LEGEND = (
    "fastattn's figures have their commit; *italics*: the kernels have changed "
    "since. Of figures measured more than once that of the newest commit is shown. The files say "
    "why a cell is empty."
)
_LIMITS = (
    "\nIn the same run a bf16 matrix product of size 8192 reached {matmul_tflops} TFLOP/s and a "
    "copy {copy_gbps} GB/s, read and written."
)
_RATIOS = (
    "Speed of the first of {}, {} and {} that was timed, as a multiple of others' in the same run. "
    "If they were timed in other runs alone, the commit is behind.\n\n".format(*BY_DEFAULT)
)
_ON_CPU = (
    "### On a CPU\n\n{started}, {cpu}, torch {torch}, one thread: `{command}`. Our time as a "
    "multiple of torch's for the same results, forward, and forward and backward, the median of "
    "samples in turns; in brackets the least microseconds of both. torch has masks and biases "
    "ready.\n\n"
)
# Words in GPU names that do not distinguish GPUs.
_OF_MANY = re.compile(r"nvidia|amd|geforce|instinct|radeon|\d+gb|hbm\w+|sxm\d*|pcie", re.I)


def markdown(*reports: Mapping[str, Any]) -> str:
    """Figures of reports of one GPU, and what ran on it."""
    return f"{_measured(reports)}\n\n{_ran(reports)}\n"


def _measured(reports: Iterable[Mapping[str, Any]]) -> str:
    """Runs, a table for each family of cases, ratios, others."""
    data, records = list(reports), newest(reports)
    cases = [record for record in records if "D" in record["case"]]
    blocks = [f"### {gpu_of(data[-1])}", *map(_heading, data), _LEGEND, *_families(cases)]
    blocks += [_ratios(cases, ordered(data)), _others(records)]
    return "\n\n".join(block for block in blocks if block)


def _heading(data: Mapping[str, Any]) -> str:
    environment, limits = data["environment"], data["ceilings"]
    about = {**environment.get("versions", {}), "cuDNN": environment.get("cudnn")}
    about["driver"] = (environment.get("gpu") or {}).get("driver")
    versions = ", ".join(f"{name} {x}" for name, x in about.items() if x)
    command = f"`{data['command']}`" if data["command"] else "single probes"
    text = f"{data['started'][:10]}, {command}: {versions}. {data.get('method', '')}".strip()
    return text + (_LIMITS.format_map(limits) if limits else "")


def shown(figure: str, record: Mapping[str, Any]) -> str:
    """Format a figure with its commit, in italics if its kernels have changed since."""
    if not record["implementation"].startswith(OURS) or not record["commit"]:
        return figure
    return f"*{figure}* {record['commit']}" if record["stale"] else f"{figure} {record['commit']}"


def _families(records: Iterable[Record]) -> Iterator[str]:
    """A table for each family, one row per case; why a call that is served has no figure."""
    families: dict[str, Rows] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record["status"] != UNSERVED:
            figure = record.get("kv_gbps") or record.get("tflops")
            rows = families[record["case"]["family"]]
            text = number(figure) if figure else record["status"]
            rows[record["case"]["name"]][record["implementation"]] = shown(text, record)
    for family, rows in families.items():
        unit = "GB/s of keys and values" if family == "decode" else "TFLOP/s"
        names = {name for row in rows.values() for name in row}
        columns = sorted(names, key=lambda name: (not name.startswith(OURS), name))
        yield f"{family}, {unit}:\n\n" + _by_case(rows, columns)


def _ratios(newest: Iterable[Record], every: Iterable[Record]) -> str:
    """Speed of the backend that `auto` takes as a multiple of the portable one's and torch's."""
    rated = {(x["case"]["name"], x["implementation"]): x for x in timed(newest)}
    runs = {(x["case"]["name"], x["implementation"], x["run"]): x for x in timed(every)}
    rows, peers = defaultdict[str, dict[str, str]](dict), (PORTABLE, *TORCH_PEERS)
    for (case, peer), theirs in rated.items():
        names = ((case, name) for name in BY_DEFAULT)
        ours = next((rated[name] for name in names if name in rated), theirs)
        if peer in peers and ours is not theirs:
            beside = runs.get((case, peer, ours["run"]))
            ratio = (beside or theirs)["ms"]["median"] / ours["ms"]["median"]
            other = "" if beside else f" ({theirs['commit']})"
            rows[case] |= {"by": shown(ours["implementation"], ours), peer: f"{ratio:.2f}{other}"}
    return _RATIOS + _by_case(rows, ["by", *peers]) if rows else ""


def _others(records: Iterable[Record]) -> str:
    """Training, host costs and others, with all their figures or a reason."""
    lines = []
    about = ("case", "implementation", "status", "ms", "commit", "date", "run", "stale")
    for record in (record for record in records if "D" not in record["case"]):
        figures = [f"{record['ms']['median']} ms"] if "ms" in record else []
        figures += [f"{key} {value}" for key, value in record.items() if key not in about]
        cell = shown(", ".join(figures), record)
        lines.append((record["case"]["name"], record["implementation"], cell))
    return table(["measurement", "of", "figures"], lines) if lines else ""


def _by_case(rows: Rows, columns: list[str]) -> str:
    """A table of these columns of rows, sorted by case."""
    lines = ([case, *(rows[case].get(name, "") for name in columns)] for case in sorted(rows))
    return table(["case", *columns], lines)


def table(columns: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a "|" in a cell becomes "/"."""
    head = list(columns)
    cells = [head, ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells)


def page(folder: Path) -> str:
    """The text of README.md for the JSON files of a folder.

    The folder's notes.md has the text around its line "<!-- tables -->".

    Raises:
        ValueError: a file is not a report.
    """
    every = reports(folder)
    before, _, behind = (folder / "notes.md").read_text("utf-8").partition("<!-- tables -->")
    parts = [before, "## Measured"]
    for gpu in dict.fromkeys(map(gpu_of, every)):
        parts.append(_measured([data for data in every if gpu_of(data) == gpu]))
    parts += [_on_cpu(path) for path in sorted((folder / "cpu").glob("*.json"))]
    parts += [_tuned(path) for path in sorted((folder / "tuned").glob("*.json"))]
    return "\n\n".join(part.strip() for part in [*parts, _ran(every), behind] if part) + "\n"


def cpu_table(report: Mapping[str, Any]) -> str:
    """Times of calls on a CPU as multiples of torch's, of what `bench/compare_cpu.py` wrote."""
    rows: Rows = defaultdict(dict)
    for record in report["rows"]:
        case, _, way = record["name"].rpartition("; ")
        rows[case][way] = f"{record['ratio']:.2f} ({record['us']:.0f} / {record['torch_us']:.0f})"
    return _by_case(rows, ["forward", "both"])


def _on_cpu(path: Path) -> str:
    report = json.loads(path.read_text("utf-8"))
    versions = report["environment"]["versions"]
    return _ON_CPU.format_map({**report, "torch": versions["torch"]}) + cpu_table(report)


def reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of a folder, by start time."""
    loaded = (load(path) for path in folder.glob("*.json"))
    return sorted(loaded, key=lambda data: str(data["started"]))


def _ran(reports: Iterable[Mapping[str, Any]]) -> str:
    """A table of the tests on GPUs, newest first."""
    lines = []
    for data in reports:
        tests = data["tests"]
        for row in tests if isinstance(tests, list) else filter(None, [tests]):
            commit, date = commit_of(data, row.get("commit"))
            of = row.get("what") or f"kinds of kernels verified: {row['status']}"
            counts = [row.get(name) for name in ("passed", "failed", "not_run")]
            counts = ["not recorded" if x is None else x for x in counts]
            lines.append((date, [commit, date[:10], gpu_of(data), *counts, of]))
    lines.sort(key=lambda line: line[0], reverse=True)
    columns = ("commit", "date", "GPU", "passed", "failed", "not run", "of")
    return "## What has run where\n\n" + table(columns, (cells for _, cells in lines))


def _tuned(path: Path) -> str:
    """The section of a file of findings: each row with all that it has; verdicts have no table."""
    environment, rows = findings.read(path)
    kinds = [kind for kind in rows if kind != "verification"]
    if not kinds:
        return ""
    about = ", ".join(f"{name} {x}" for name, x in environment._asdict().items())
    parts = [
        f"## {environment.gpu}: what `fastattn tune` found, {_date(rows)}",
        f"[tuned/{path.name}](tuned/{path.name}): {about}. gain: the part of the shipped choice's "
        "time that is saved; above 0.03 in both halves of the samples another takes its place.",
    ]
    for kind in kinds:
        columns = dict.fromkeys((*findings.KEYS[kind], *(x for row in rows[kind] for x in row)))
        lines = ([row.get(name, "") for name in columns] for row in rows[kind])
        parts.append(f"{kind}:\n\n" + table(columns, lines))
    return "\n\n".join(parts)


def _date(rows: dict[str, list[dict[str, Any]]]) -> str:
    return max((row["date"] for of_kind in rows.values() for row in of_kind), default="empty")


def add(path: Path, results: Path, shipped: Path = tuning.FOLDER) -> list[Path]:
    """Add a file of findings or a report to `results`, named by GPU and date; return what it wrote.

    No other run is overwritten; findings of one day and environment are merged.

    Tiles of the findings replace those in the tables of the folder `shipped`.

    Raises:
        ValueError: the file has another kind, or no GPU.
    """
    try:
        stored = findings.read(path)
    except Unreadable as error:
        try:
            data = load(path)
        except ValueError:
            raise ValueError(f"{path} is neither a report nor findings: {error}") from None
        gpu = data.get("environment", {}).get("gpu")
        if not gpu:
            raise ValueError(f"{path} is a report of no GPU") from None
        name = f"{slug(gpu['name'])}-{data['started'][:10]}"
        copy = _place(results, name, lambda file: load(file)["started"] == data["started"])
        save(copy, data)
        return [copy]
    environment, rows = stored
    if not rows or environment.gpu == "interpreter":
        raise ValueError(f"{path} has no findings of a GPU")
    (results / "tuned").mkdir(exist_ok=True)
    name = f"{slug(environment.gpu)}-{_date(rows)}"
    alike = _place(results / "tuned", name, lambda x: findings.read(x).environment == environment)
    there = findings.read(alike).rows if alike.exists() else {}
    both = {kind: [*there.get(kind, ()), *rows.get(kind, ())] for kind in {**there, **rows}}
    merged = {kind: findings.merged(kind, *of_kind) for kind, of_kind in both.items()}
    findings.write(alike, stored._replace(rows=merged))
    return [alike, *tuning.ship(stored, shipped)]


def _place(folder: Path, name: str, is_same: Callable[[Path], bool]) -> Path:
    """The file of this name, or with a number, that does not exist or is of the same run."""
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    paths = (folder / f"{each}.json" for each in names)
    return next(path for path in paths if not path.exists() or is_same(path))


def slug(gpu: str) -> str:
    """A GPU's name in file names: "h100" for "NVIDIA H100 80GB HBM3"."""
    return "-".join(re.findall(r"[a-z0-9]+", _OF_MANY.sub(" ", gpu).lower()))
