"""A full run on a GPU: numeric tests, measurements and tuning within a time, and a report of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ...tuned import findings
from ..results import charts
from ..results.report import DONE, Report, markdown, write_whole
from . import numeric_tests
from .supervise import Budget, ProcessGroup, supervise

# Seconds kept for the tables and pictures at the end.
_RESERVE = 20.0


def shares(seconds: float) -> dict[str, float]:
    """The split of a time budget: seconds for the tests at most, and seconds kept for tuning."""
    return {"tests": min(150.0, 0.25 * seconds), "tuning": 0.2 * seconds}


def run_all(
    out: Path,
    checkout: Path,
    which: str,
    seconds: float,
    command: str,
    *,
    skip: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
    suite: Callable[[Path, str, float], list[str]] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Test, measure and tune on this machine's GPU, within a time.

    Args:
        out: folder, made if missing, for results.json, results.md, PNG files, log.txt, tests.jsonl
            and tuned.json, the findings of `bench/tune.py`; an earlier run there is continued.
        checkout: the repository, whose tests and scripts are run.
        which: case set; with "quick" there is no time for tuning.
        seconds: for everything.
        command: for the report.
        skip: of "tests", "suite", "tuning".
        say: prints a line as each part begins.
        suite: makes the command that measures, from report, case set and seconds; default
            `fastattn.bench.run.suite`.
        sleep, clock: of the host.

    Returns:
        The report as it is on disk.
    """
    budget = Budget(seconds, clock)
    out = out.resolve()
    share = shares(seconds)
    wanted = {"tests", "suite", "tuning"} - set(skip) - ({"tuning"} if which == "quick" else set())
    out.mkdir(parents=True, exist_ok=True)
    path, log = out / "results.json", out / "log.txt"
    report = Report.load(path) if path.exists() else Report.create(path, command)
    start = partial(ProcessGroup, environment=_variables())
    if "tests" in wanted and report.data["tests"].get("status") != "finished":
        most = share["tests"] if "suite" in wanted else budget.left(_RESERVE)
        say(f"numeric tests, at most {most:.0f} s")
        report.data["tests"] = numeric_tests.run(
            numeric_tests.command(checkout),
            log,
            out / "tests.jsonl",
            most,
            start=start,
            sleep=sleep,
            clock=clock,
        )
        report.save()
    if "suite" in wanted:
        kept = _RESERVE + (share["tuning"] if "tuning" in wanted else 0.0)
        say(f"measurements, at most {budget.left(kept):.0f} s")
        outcome = supervise(
            lambda left: start((suite or _suite_command)(path, which, left), log),
            path,
            lambda: budget.left(kept),
            sleep=sleep,
            clock=clock,
        )
        report = Report.load(path)
        report.data["suite"] = outcome
        report.save()
    if "tuning" in wanted and report.data.get("suite") != "no GPU":
        say(f"tiles, at most {budget.left(_RESERVE):.0f} s")
        _run_tuning(checkout, out, partial(start, log=log), budget, sleep)
    report = Report.load(path)
    report.data["tuning"] = tuned_tiles(out / "tuned.json") or report.data["tuning"]
    report.save()
    write_whole(out / "results.md", markdown(report.data))
    try:
        charts.write(charts.measured(report.data), out)
    except Exception as error:  # the figures are safe; a picture can be drawn again from them
        say(f"no pictures: {error}")
    return report


def _run_tuning(
    checkout: Path,
    out: Path,
    start: Callable[[list[str]], ProcessGroup],
    budget: Budget,
    sleep: Callable[[float], None],
) -> None:
    seconds = budget.left(_RESERVE)
    if seconds < 10:
        return
    script = str(checkout / "bench" / "tune.py")
    arguments = ["--out", str(out), "--seconds", f"{seconds - 5:.0f}"]
    process = start([sys.executable, script, *arguments])
    # The sweep keeps its own deadline; this ends one that hangs.
    while process.poll() is None:
        if budget.left(_RESERVE) <= 0:
            break
        sleep(0.2)
    process.kill()


def tuned_tiles(path: Path) -> dict[str, Any]:
    """The tiles in a file of findings, as a report has them; nothing without the file."""
    if not path.exists():
        return {}
    rows = findings.read(path).rows.get("tiles", [])
    return {"rows": [row for row in rows if row["kernel"] not in tiles.HOPPER]}


def _suite_command(path: Path, which: str, seconds: float) -> list[str]:
    module = [sys.executable, "-m", "fastattn.bench.run.suite", "--report", str(path)]
    return [*module, "--set", which, "--seconds", f"{seconds:.0f}"]


def _variables() -> dict[str, str]:
    """This process's environment, without variables that keep kernels from running compiled.

    The checkout must not be on sys.path: see the note in tests/conftest.py. torch.compile compiles
    in one process, since kernels come one at a time.
    """
    hidden = ("TRITON_INTERPRET", "FASTATTN_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def summary(data: dict[str, Any]) -> str:
    """A few lines for the end of a log: how tests, measurements and tuning ended."""
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
