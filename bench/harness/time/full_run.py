"""A full run on a GPU: numeric tests, measurements and tuning within a time, with a report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...tuned.store import CACHE_DIR
from ..results import charts
from ..results.report import DONE, Report, newest, untimed, write_whole
from ..results.tables import markdown
from . import numeric_tests
from .jobs import gpu_jobs
from .measure import measure
from .supervise import ChildProcess, python, variables

PARTS = ("tests", "suite", "tuning")
# Seconds reserved for the tables and pictures.
_RESERVE = 20.0


def shares(seconds: float) -> dict[str, float]:
    """Split a time budget: most seconds for the tests, and seconds reserved for tuning."""
    return {"tests": min(150.0, 0.25 * seconds), "tuning": 0.2 * seconds}


def run_all(
    out: Path,
    checkout: Path,
    which: str,
    seconds: float,
    command: str,
    *,
    skip: Collection[str] = (),
    earlier: Iterable[Mapping[str, Any]] = (),
    say: Callable[[str], None] = lambda line: None,
    start: Callable[..., ChildProcess] = ChildProcess,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Test, measure and tune on this machine's GPU, within a time.

    Args:
        out: folder, created if missing, for results.json, results.md, SVG files, log.txt,
            tests.jsonl and tuned.json, the findings of `fastattn tune`; continues an earlier run.
        checkout: the repository with the tests.
        which: case set; "quick" excludes tuning.
        seconds: for the whole run.
        command: for the report.
        skip: of PARTS.
        earlier: reports of this GPU; measurements that they lack, or of changed kernels, come
            first.
        say: prints a line at the start of each part.
        start: starts a process, as `ChildProcess` does.
        sleep, clock: of the host.

    Returns:
        The report, as on disk.
    """
    end = clock() + seconds
    out = out.resolve()
    share = shares(seconds)
    wanted = set(PARTS) - set(skip) - ({"tuning"} if which == "quick" else set())
    out.mkdir(parents=True, exist_ok=True)
    report = Report.at(out / "results.json", command)
    begin = partial(start, log=out / "log.txt")
    environment = variables()

    def left(reserve: float = _RESERVE) -> float:
        return end - clock() - reserve

    def code_of(command: list[str], settings: dict[str, str], until: float) -> int | None:
        """The exit code of a command; None: it was stopped with `until` seconds left."""
        process = begin(command, environment | settings, listen=False)
        while (code := process.poll()) is None and left(until) > 0:
            sleep(0.2)
        process.kill()
        return code

    if "tests" in wanted and report.data["tests"].get("status") != "finished":
        most = share["tests"] if "suite" in wanted else left()
        say(f"numeric tests, at most {most:.0f} s")
        path = out / "tests.jsonl"
        settings = numeric_tests.variables(path)
        code = code_of(numeric_tests.command(checkout), settings, left(0.0) - most)
        report.data["tests"] = numeric_tests.summary(path, code)
        report.save()
    if "suite" in wanted:
        kept = _RESERVE + (share["tuning"] if "tuning" in wanted else 0.0)
        say(f"measurements, at most {left(kept):.0f} s")
        records = newest(earlier)
        jobs = sorted(gpu_jobs(which), key=lambda job: not untimed(job.name, records))
        suite = "fastattn.bench.time.suite"
        report.data["suite"] = measure(
            jobs,
            report.data,
            report.save,
            lambda names: begin(python(suite, which, json.dumps(names)), environment),
            lambda: left(kept),
            sleep=sleep,
            clock=clock,
        )
        report.save()
    if "tuning" in wanted and left() >= 10:
        say(f"tiles, at most {left():.0f} s")
        tune = [sys.executable, "-m", "fastattn", "tune", "--export", str(out / "tuned.json")]
        # It has its own deadline; ours stops a hang.
        tune += ["--seconds", f"{left() - 5:.0f}"]
        code_of(tune, {CACHE_DIR: str(out / "findings")}, _RESERVE)
    write_whole(out / "results.md", markdown(report.data))
    try:
        charts.write(charts.measured(report.data), out)
    except Exception as error:  # the figures are safe; pictures can be drawn again
        say(f"no pictures: {error}")
    return report


def summary(data: dict[str, Any]) -> str:
    """Last lines of a log: outcomes of tests and measurements."""
    jobs = data["jobs"].values()
    done = sum(job["status"] == DONE for job in jobs)
    tests = data["tests"]
    lines = []
    if tests:
        lines = [f"tests: {tests['status']}; {tests['passed']} passed, {tests['failed']} failed"]
        lines += [f"  {name}" for name in tests["failures"][:10]]
    lines.append(f"suite: {data.get('suite', 'not run')}; {done} of {len(jobs)} jobs done")
    return "\n".join(lines)
