"""One command on a machine with a GPU: tests, measurements, tiles; a report whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import plots
from .report import DONE, Report, markdown, write_whole
from .supervise import Budget, ProcessGroup, run_tests, supervise

# Seconds kept for the tables and pictures at the end.
_RESERVE = 20.0
# Files whose tests hold kernels to the error budget, run compiled where there is a GPU.
_NUMERIC = (
    "attention", "ops", "mask", "modules", "forward", "backward", "one_pass", "decode", "softmax",
    "descriptors",
)  # fmt: skip


def shares(seconds: float) -> dict[str, float]:
    """How a budget is divided: seconds for the tests at most, and those kept for the tuning."""
    return {"tests": min(150.0, 0.25 * seconds), "tuning": 0.2 * seconds}


def run_all(
    out: Path,
    checkout: Path,
    which: str,
    seconds: float,
    command: str,
    *,
    skip: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Test, measure and tune on this machine's GPU, within a time.

    Args:
        out: folder, made if missing, for results.json, results.md, PNG files, log.txt and the
            tuning table; a report that is there is continued.
        checkout: the repository, whose tests and scripts are run.
        which: case set.
        seconds: for everything.
        command: for the report.
        skip: of "tests", "suite", "tuning".
        say: told what begins.

    Returns:
        The report as it is on disk.
    """
    budget = Budget(seconds)
    out = out.resolve()
    share = shares(seconds)
    out.mkdir(parents=True, exist_ok=True)
    path, log = out / "results.json", out / "log.txt"
    report = Report.load(path) if path.exists() else Report.create(path, command)
    if "tests" not in skip and not report.data["tests"]:
        say(f"numeric tests, at most {share['tests']:.0f} s")
        limit = min(share["tests"], budget.left())
        start = partial(ProcessGroup, environment=_variables())
        found = run_tests(test_command(checkout), log, limit, start=start)
        report.data["tests"] = found
        report.save()
    if "suite" not in skip:
        kept = _RESERVE + (0.0 if "tuning" in skip else share["tuning"])
        say(f"measurements, at most {budget.left(kept):.0f} s")
        outcome = supervise(
            lambda left: ProcessGroup(_suite_command(path, which, left), log, _variables()),
            path,
            lambda: budget.left(kept),
        )
        report = Report.load(path)
        report.data["suite"] = outcome
        report.save()
    if "tuning" not in skip and report.data.get("suite") != "no GPU":
        say(f"tiles, at most {budget.left(_RESERVE):.0f} s")
        _run_tuning(checkout, out, log, budget)
    report = Report.load(path)
    write_whole(out / "results.md", markdown(report.data))
    try:
        plots.draw_all(report.data, out)
    except Exception as error:  # the figures are safe; a picture can be drawn again from them
        say(f"no pictures: {error}")
    return report


def _run_tuning(checkout: Path, out: Path, log: Path, budget: Budget) -> None:
    seconds = budget.left(_RESERVE)
    if seconds < 10:
        return
    script = str(checkout / "bench" / "tune.py")
    arguments = ["--out", str(out), "--seconds", f"{seconds - 5:.0f}"]
    process = ProcessGroup([sys.executable, script, *arguments], log, _variables())
    # The sweep ends by itself; this is for one that hangs.
    while process.poll() is None:
        if budget.left(_RESERVE) <= 0:
            process.kill()
            return
        time.sleep(0.2)


def test_command(checkout: Path) -> list[str]:
    """pytest over the numeric tests of the kernels, and everything that is marked gpu."""
    tests = checkout / "tests"
    numeric = {p for name in _NUMERIC for p in tests.glob(f"test_{name}*.py")}
    marked = {p for p in tests.glob("test_*.py") if "mark.gpu" in p.read_text(encoding="utf-8")}
    files = sorted(str(p) for p in numeric | marked)
    parallel = ["-n", "6"] if find_spec("xdist") is not None else []
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
    return [sys.executable, "-m", "pytest", *files, *options, *parallel]


def _suite_command(path: Path, which: str, seconds: float) -> list[str]:
    module = [sys.executable, "-m", "fastattn.bench.suite", "--report", str(path)]
    return [*module, "--set", which, "--seconds", f"{seconds:.0f}"]


def _variables() -> dict[str, str]:
    """This process's environment, without what would keep kernels from being compiled or chosen.

    Nor may the checkout itself be on the path of imports: see the note in tests/conftest.py. One
    kernel at a time needs none of the many compiling processes that torch.compile would start.
    """
    hidden = ("TRITON_INTERPRET", "FASTATTN_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def summary(data: dict[str, Any]) -> str:
    """A few lines for the end of a log: how the parts ended, and the ratios to peers."""
    jobs = data["jobs"].values()
    done = sum(job["status"] == DONE for job in jobs)
    tests = data["tests"]
    lines = [f"suite: {data.get('suite', 'not run')}; {done} of {len(jobs)} jobs done"]
    if tests:
        lines.insert(
            0, f"tests: {tests['status']}; {tests['passed']} passed, {tests['failed']} failed"
        )
        lines[1:1] = [f"  {name}" for name in tests["failures"][:10]]
    lines.append(f"tiles: {len(data['tuning'].get('rows', []))} rows measured")
    return "\n".join(lines)
