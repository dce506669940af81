"""Run jobs in child processes that may hang or die: each such end is an outcome of its case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...bench.time.failures import LOST
from .case import Subject
from .verdicts import CRASH, HANG, Outcome

_INTERVAL = 0.05


class Job(NamedTuple):
    """Cases of a subject, by name."""

    subject: Subject
    cases: tuple[str, ...]


class Child(Protocol):
    """A process that runs jobs, see `child`."""

    def send(self, job: Job) -> None: ...

    def messages(self) -> list[dict[str, Any]]:
        """Messages that have come since the last call."""
        ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        ...


class Stall(NamedTuple):
    """Seconds without a message after which a child is killed: while it starts, and in a case.

    It tells of each kernel that is compiled, which is what takes longest.
    """

    start: float = 180.0
    case: float = 90.0


STALL = Stall()


class Ended(NamedTuple):
    """A job that has ended, all its cases run or the first that its process did not survive."""

    subject: Subject
    outcomes: list[Outcome]


def supervise(
    jobs: Iterable[Job],
    start: Callable[[], Child],
    *,
    children: int = 1,
    stall: Stall = STALL,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Ended]:
    """Yield each job when it has ended.

    Args:
        jobs: in the order in which they begin.
        start: starts a child.
        children: how many run at once.
        stall, sleep, clock: seconds, of the host.

    Raises:
        ChildProcessError: a child cannot do anything; the message says what it wrote last.
    """
    waiting = deque(jobs)
    workers = [_Worker(start, stall, clock) for _ in range(min(children, len(waiting)))]
    try:
        while workers:
            for worker in tuple(workers):
                if worker.job is None and not waiting:
                    worker.end()
                    workers.remove(worker)
                    continue
                if worker.job is None:
                    worker.begin(waiting.popleft())
                if (ended := worker.look()) is not None:
                    yield ended
            if workers:
                sleep(_INTERVAL)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A child, and the job that it has."""

    def __init__(
        self, start: Callable[[], Child], stall: Stall, clock: Callable[[], float]
    ) -> None:
        self._start, self._stall, self._clock = start, stall, clock
        self._child: Child | None = None
        self._ready = False
        self._running: str | None = None
        self._outcomes: list[Outcome] = []
        self.job: Job | None = None

    def begin(self, job: Job) -> None:
        self.job, self._outcomes, self._running = job, [], None
        self._heard = self._clock()
        if self._child is None:
            self._child, self._ready = self._start(), False
        else:
            self._child.send(job)

    def look(self) -> Ended | None:
        """Take in what the child has told; the job, if that has ended."""
        assert self._child is not None and self.job is not None
        code = self._child.poll()  # before its last messages are read
        for message in self._child.messages():
            self._heard = self._clock()
            if "ready" in message:
                self._ready = True
                self._child.send(self.job)
            elif "starts" in message:
                self._running = message["starts"]
            elif "outcome" in message:
                self._outcomes.append(Outcome(*message["outcome"]))
                self._running = None
            elif "done" in message:
                return self._ended()
        if code is not None:
            return self._died(code)
        limit = self._stall.case if self._ready else self._stall.start
        if self._clock() - self._heard > limit:
            return self._hangs(limit)
        return None

    def end(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = None

    def _ended(self) -> Ended:
        assert self.job is not None
        ended = Ended(self.job.subject, self._outcomes)
        self.job = None
        return ended

    def _died(self, code: int) -> Ended:
        assert self._child is not None
        words = self._child.last_words()
        self.end()
        if self._running is None and not (code == LOST and self._outcomes):
            raise ChildProcessError(f"the process of the cases {_how(code)}: {words}")
        if self._running is not None:
            self._outcomes.append(Outcome(self._running, CRASH, None, f"{_how(code)}: {words}"))
        return self._ended()

    def _hangs(self, limit: float) -> Ended:
        self.end()
        if self._running is None:
            raise ChildProcessError(f"the process of the cases said nothing for {limit:.0f} s")
        reason = f"no progress for {limit:.0f} s"
        self._outcomes.append(Outcome(self._running, HANG, None, reason))
        return self._ended()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


# Modules are found where this process finds them, whatever the folder that it runs in.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import main; main()"
)


def python(module: str, *arguments: str) -> list[str]:
    """A command that runs main() of a module, with arguments."""
    return [sys.executable, "-c", _PROGRAM.format(module=module), *arguments, json.dumps(sys.path)]


class ChildProcess:
    """A child, killed together with processes that it starts.

    Args:
        command: and its arguments.
        environment: its variables.
        log: file that what it writes to stderr is appended to; default one of its own.
        listen: its stdout has messages; else the log has that too.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        *,
        listen: bool = True,
    ) -> None:
        # Open for as long as the process.
        self._log = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if listen else self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""

    def send(self, job: Job) -> None:
        assert self._process.stdin is not None
        # One that has died is seen by its exit code.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def messages(self) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(descriptor, 1 << 16):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One that waits in a driver ends when that lets it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for file in filter(None, (self._process.stdin, self._process.stdout, self._log)):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no message")
