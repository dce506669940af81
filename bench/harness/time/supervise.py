"""Supervisor of the measuring process: a crash or a hang costs one implementation, not the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..results.report import LEFT, Report
from .failures import LOST
from .samples import PREPARES, RUNS
from .suite import NO_GPU, blame

_MOST_STARTS = 25


class Process(Protocol):
    """A child process: poll for its exit code, interrupt it, or kill it."""

    def poll(self) -> int | None: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...


class ProcessGroup:
    """A process and its children, killed together.

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

    def interrupt(self) -> None:
        """Send the process, not its children, the SIGINT of Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Budget:
    """A deadline, with reserves.

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


# Seconds without a change of the report after which its process is killed. Compilation takes long;
# kernels on the device do not.
STALL = {PREPARES: 90.0, RUNS: 25.0}


def supervise(
    start: Callable[[float], Process],
    path: Path,
    left: Callable[[], float],
    *,
    stall: Mapping[str, float] = STALL,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Run the measuring process until it has finished or the time is up.

    Args:
        start: starts it, given the seconds it has; it writes a `Report` to `path`.
        path: the report; it exists.
        left: seconds left.
        stall: seconds without a change of the report after which the process is killed, by the
            phase in the report.
        sleep, clock: of the host.

    Returns:
        How it ended: "finished", "the time was up", "no GPU", or what went wrong.
    """
    for _ in range(_MOST_STARTS):
        if left() <= 0:
            return "the time was up"
        before = Report.load(path).data["jobs"]
        process = start(left())
        why = _watch(process, path, left, stall, sleep, clock)
        code = process.poll()
        process.kill()  # children that outlive it
        if why == "the time was up":
            _set_running(path, why)
            return why
        if why is None and code in (0, NO_GPU):
            return "finished" if code == 0 else "no GPU"
        if why is None and code == LOST:
            continue
        why = why or f"ended the process with exit code {code}"
        if not _blame_running(path, why) and Report.load(path).data["jobs"] == before:
            return f"the measuring process {why}, with nothing running"
    return f"the measuring process was started {_MOST_STARTS} times"


def _watch(
    process: Process,
    path: Path,
    left: Callable[[], float],
    stall: Mapping[str, float],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> str | None:
    """Wait until a process ends; return why if it was killed here."""
    seen, since, limit = path.stat().st_mtime_ns, clock(), stall[PREPARES]
    while process.poll() is None:
        sleep(0.2)
        changed = path.stat().st_mtime_ns
        if changed != seen:
            seen, since = changed, clock()
            running = Report.load(path).running()
            limit = stall[running[1].get("doing", PREPARES) if running else PREPARES]
        if left() <= 0:
            process.kill()
            return "the time was up"
        if clock() - since > limit:
            process.kill()
            return f"made no progress for {limit:.0f} s"
    return None


def _blame_running(path: Path, why: str) -> bool:
    report = Report.load(path)
    running = report.running()
    if running is None:
        return False
    blame(report, running[0], why)
    report.save()
    return True


def _set_running(path: Path, why: str) -> None:
    report = Report.load(path)
    running = report.running()
    if running is not None:
        report.data["jobs"][running[0]] = {"status": LEFT, "reason": why}
        report.save()
