"""A full run on a GPU: numeric tests, measurements and tuning within a time, and a report of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from ...tuned.store import CACHE_DIR
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
    start: Callable[..., ProcessGroup] = ProcessGroup,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Test, measure and tune on this machine's GPU, within a time.

    Args:
        out: folder, made if missing, for results.json, results.md, SVG files, log.txt, tests.jsonl
            and tuned.json, the findings of `fastattn tune`; an earlier run there is continued.
        checkout: the repository, whose tests are run.
        which: case set; with "quick" there is no time for tuning.
        seconds: for everything.
        command: for the report.
        skip: of "tests", "suite", "tuning".
        say: prints a line as each part begins.
        start: starts a process, given its command, its log and its environment.
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
    report = Report.at(path, command)
    variables = _variables()
    started = partial(start, log=log, environment=variables)
    if "tests" in wanted and report.data["tests"].get("status") != "finished":
        most = share["tests"] if "suite" in wanted else budget.left(_RESERVE)
        say(f"numeric tests, at most {most:.0f} s")
        report.data["tests"] = numeric_tests.run(
            numeric_tests.command(checkout),
            out / "tests.jsonl",
            most,
            start=started,
            sleep=sleep,
            clock=clock,
        )
        report.save()
    if "suite" in wanted:
        kept = _RESERVE + (share["tuning"] if "tuning" in wanted else 0.0)
        say(f"measurements, at most {budget.left(kept):.0f} s")
        suite = [sys.executable, "-m", "fastattn.bench.time.suite", "--report", str(path)]
        outcome = supervise(
            lambda left: started([*suite, "--set", which, "--seconds", f"{left:.0f}"]),
            path,
            lambda: budget.left(kept),
            sleep=sleep,
            clock=clock,
        )
        report = Report.load(path)
        report.data["suite"] = outcome
        report.save()
    if "tuning" in wanted and report.data.get("suite") != "no GPU":
        seconds = budget.left(_RESERVE)
        say(f"tiles, at most {seconds:.0f} s")
        tune = [sys.executable, "-m", "fastattn", "tune", "--export", str(out / "tuned.json")]
        if seconds >= 10:
            beside = variables | {CACHE_DIR: str(out / "findings")}
            process = started([*tune, "--seconds", f"{seconds - 5:.0f}"], environment=beside)
            # It keeps its own deadline; this ends one that hangs.
            while process.poll() is None and budget.left(_RESERVE) > 0:
                sleep(0.2)
            process.kill()
    write_whole(out / "results.md", markdown(report.data))
    try:
        charts.write(charts.measured(report.data), out)
    except Exception as error:  # the figures are safe; a picture can be drawn again from them
        say(f"no pictures: {error}")
    return report


def _variables() -> dict[str, str]:
    """This process's environment, without variables that keep kernels from running compiled.

    The checkout must not be on sys.path: see the note in tests/conftest.py. torch.compile compiles
    in one process, since kernels come one at a time.
    """
    hidden = ("TRITON_INTERPRET", "FASTATTN_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def summary(data: dict[str, Any]) -> str:
    """A few lines for the end of a log: how tests and measurements ended."""
    jobs = data["jobs"].values()
    done = sum(job["status"] == DONE for job in jobs)
    tests = data["tests"]
    lines = []
    if tests:
        lines = [f"tests: {tests['status']}; {tests['passed']} passed, {tests['failed']} failed"]
        lines += [f"  {name}" for name in tests["failures"][:10]]
    lines.append(f"suite: {data.get('suite', 'not run')}; {done} of {len(jobs)} jobs done")
    return "\n".join(lines)
