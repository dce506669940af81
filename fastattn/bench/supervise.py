"""Keep other processes going, and end them in time: a crash or a hang costs one implementation."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from .report import LEFT, Report
from .suite import LOST, NO_GPU, blame

_MOST_STARTS = 25


class Process(Protocol):
    """What is needed of a process: its exit code or None, and an end to it."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class ProcessGroup:
    """A process and everything that it starts, ended together.

    Args:
        command: and its arguments.
        log: file that its output is appended to.
        environment: its variables; default this process's.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Budget:
    """Time that may be spent.

    Args:
        seconds: from now.
        clock: seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self, reserve: float = 0.0) -> float:
        """Seconds left beyond a reserve; 0 or less when there are none."""
        return self._end - self._clock() - reserve


def supervise(
    start: Callable[[float], Process],
    path: Path,
    left: Callable[[], float],
    *,
    stall: float = 90.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Run the measuring process until it has finished or the time is up.

    Args:
        start: starts it, given the seconds it has; it writes a `Report` to `path`.
        path: the report; it exists.
        left: seconds left.
        stall: seconds without a change of the report after which the process is ended.
        sleep, clock: of the host.

    Returns:
        How it ended: "finished", "the time was up", "no GPU", or what went wrong.
    """
    for _ in range(_MOST_STARTS):
        if left() <= 0:
            return "the time was up"
        process = start(left())
        why = _watch(process, path, left, stall, sleep, clock)
        if why == "the time was up":
            _set_running(path, why)
            return why
        code = process.poll()
        if why is None and code in (0, NO_GPU):
            return "finished" if code == 0 else "no GPU"
        if why is None and code == LOST:
            continue
        why = why or f"ended the process with exit code {code}"
        if not _blame_running(path, why):
            return f"the measuring process {why}, with nothing running"
    return f"the measuring process was started {_MOST_STARTS} times"


def _watch(
    process: Process,
    path: Path,
    left: Callable[[], float],
    stall: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> str | None:
    """Wait for the end of a process; why it was ended from here, if it was."""
    seen, since = path.stat().st_mtime_ns, clock()
    while process.poll() is None:
        sleep(0.2)
        changed = path.stat().st_mtime_ns
        if changed != seen:
            seen, since = changed, clock()
        if left() <= 0:
            process.kill()
            return "the time was up"
        if clock() - since > stall:
            process.kill()
            return f"made no progress for {stall:.0f} s"
    return None


def _blame_running(path: Path, why: str) -> bool:
    report = Report.load(path)
    running = report.running()
    if running is None:
        return False
    blame(report, *running, why)
    report.save()
    return True


def _set_running(path: Path, why: str) -> None:
    report = Report.load(path)
    running = report.running()
    if running is not None:
        report.data["jobs"][running[0]] = {"status": LEFT, "reason": why}
        report.save()


def run_tests(
    command: Sequence[str],
    log: Path,
    seconds: float,
    *,
    start: Callable[..., Process] = ProcessGroup,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run `pytest -v` for at most some seconds.

    Returns:
        status ("finished", "the time was up" or the exit code), passed, failed, and failures, the
        names of the tests that failed; counted from the log, so that an early end counts too.
    """
    begin = clock()
    process = start(command, log)
    status = None
    while process.poll() is None:
        if clock() - begin > seconds:
            process.kill()
            status = "the time was up"
            break
        sleep(0.2)
    code = process.poll()
    text = log.read_text(encoding="utf-8", errors="replace")
    names = {"passed": "PASSED", "failed": "FAILED", "errors": "ERROR"}
    return {
        "status": status or ("finished" if code in (0, 1) else f"pytest ended with code {code}"),
        "seconds": round(clock() - begin, 1),
        **{key: len(set(_tests(text, word))) for key, word in names.items()},
        "failures": sorted({*_tests(text, "FAILED"), *_tests(text, "ERROR")})[:40],
    }


def _tests(log: str, outcome: str) -> list[str]:
    """Names of tests with an outcome, as `pytest -v` writes them, alone or in parallel."""
    alone = re.findall(rf"^(\S+::.+?) {outcome}\b", log, re.MULTILINE)
    parallel = re.findall(rf"^\[gw\d+\].*? {outcome} (\S+::.*?)\s*$", log, re.MULTILINE)
    return alone + parallel
