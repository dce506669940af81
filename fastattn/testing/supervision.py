"""Supervise child processes: a crash or a hang ends one job, not the run.

A child receives jobs and sends messages as lines of JSON: `ready` after its start, `at` and `doing`
for each new phase, and `done` after each job.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]
Tell = Callable[..., None]
# Phases: host work such as compilation and inputs; work on the device; work with its own end.
STARTS, PREPARES, RUNS, WAITS = "starts", "prepares", "runs", "waits"
# Seconds without a message until a process is killed. Compilation is slow; kernels are not.
STALL = {STARTS: 120.0, PREPARES: 90.0, RUNS: 8.0, WAITS: math.inf}
_INTERVAL = 0.05
_MOST, _BEGINNING = 400, 120  # characters of a reason, and of its start if it is longer


class Ended(NamedTuple):
    """A finished job: its messages, and the last running implementation.

    why: how its process ended, if it did. hung: it was killed after a stall.
    """

    job: Any
    messages: list[Message]
    at: str
    why: str = ""
    hung: bool = False


def supervise(
    waiting: deque[Any],
    start: Callable[[], ChildProcess],
    *,
    request: Callable[[Any], Any] = lambda job: job,
    heard: Callable[[Any, Message], None] = lambda job, message: None,
    children: int = 1,
    left: Callable[[], float] = lambda: math.inf,
    grace: float = 0.0,
) -> Iterator[Ended]:
    """Yield each job at its end, until no job or no time is left.

    waiting: jobs in order; keeps the jobs that were not done. Jobs may be added meanwhile. request:
    returns the message for a job. heard: called with a job and each message about it. children:
    number of concurrent processes. left: returns the seconds left; at 0 no job begins. grace:
    further seconds for running jobs.

    Raises:
        ChildProcessError: a child cannot start; the message has its last line.
    """
    workers = [_Worker(start, request, heard) for _ in range(min(children, len(waiting)))]
    try:
        while workers:
            for worker in tuple(workers):
                if worker.job is None and not (waiting and left() > 0):
                    worker.end()
                    workers.remove(worker)
                    continue
                if left() <= -grace:
                    waiting.extendleft(x.job for x in workers if x.job is not None)
                    return
                if worker.job is None:
                    worker.begin(waiting.popleft())
                if (ended := worker.look()) is not None:
                    yield ended
            if workers:
                time.sleep(_INTERVAL)
    finally:
        for worker in workers:
            worker.end()


@dataclass
class _Worker:
    """A child and its job."""

    start: Callable[[], ChildProcess]
    request: Callable[[Any], Any]
    tell: Callable[[Any, Message], None]
    _child: ChildProcess | None = None
    job: Any = None

    def begin(self, job: Any) -> None:
        self.job, self._told, self._at = job, list[Message](), ""
        self._heard = time.monotonic()
        self._doing = PREPARES
        if self._child is None:
            self._child, self._doing = self.start(), STARTS
        else:
            self._child.send(self.request(job))

    def look(self) -> Ended | None:
        """Read the child's messages; return the job if it has ended."""
        assert self._child is not None
        code = self._child.poll()  # before its last messages are read
        for message in self._child.messages():
            self._heard = time.monotonic()
            if "ready" in message:
                self._doing = PREPARES
                self._child.send(self.request(self.job))
                continue
            self._at = message.get("at", self._at)
            self._doing = message.get("doing", self._doing)
            self._told.append(message)
            self.tell(self.job, message)
            if "done" in message:
                return self._ended()
        limit = STALL[self._doing]
        if code is None and time.monotonic() - self._heard <= limit:
            return None
        why = f"made no progress for {limit:.0f} s" if code is None else self._how(code)
        self.end()
        if not self._at:
            raise ChildProcessError(f"the process {why}, with no implementation running")
        return self._ended(why, hung=code is None)

    def end(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = None

    def _ended(self, why: str = "", hung: bool = False) -> Ended:
        ended = Ended(self.job, self._told, self._at, why, hung)
        self.job = None
        return ended

    def _how(self, code: int) -> str:
        assert self._child is not None
        names = {-x.value: f"by {x.name}" for x in signal.Signals}
        how = names.get(code, f"with exit code {code}")
        return f"ended {how}: {self._child.last_words()}"


# Children use this process's sys.path, in any working directory.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import main; main()"
)


def python(module: str, *arguments: str) -> list[str]:
    """A command that runs main() of a module."""
    return [sys.executable, "-c", _PROGRAM.format(module=module), *arguments, json.dumps(sys.path)]


def talk(work: Callable[[Tell, Iterator[Any]], object]) -> None:
    """Call `work` in a child, with a sender and the incoming jobs, and exit.

    The child ends with its parent. Prints go to stderr. An error is its last line.
    """
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    code = 0
    try:
        work(tell, (json.loads(line) for line in sys.stdin))
    except Exception as error:
        log("the process ends", error)
        sys.stderr.write(f"{reason(error)}\n")
        code = 1
    sys.stderr.flush()
    # After a lost CUDA context, destructors abort the process.
    os._exit(code)


def reason(error: BaseException) -> str:
    """Format an error's type and message in a line; a long one without its middle.

    Compilers' messages begin with the location and end with the cause.
    """
    text = " ".join(str(error).split())
    if len(text) > _MOST:
        text = f"{text[:_BEGINNING]} ... {text[_BEGINNING - _MOST :]}"
    return f"{type(error).__name__}: {text}"


def log(where: str, error: BaseException) -> None:
    """Write an error with its traceback to stderr, the log of a full run."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"\n{where}:\n{''.join(lines)}")
    sys.stderr.flush()


def variables() -> dict[str, str]:
    """Copy this process's environment, without variables that prevent compiled kernels."""
    # The checkout must not be on sys.path: see tests/conftest.py. torch.compile uses one process,
    # since kernels come one at a time.
    hidden = ("TRITON_INTERPRET", "FASTATTN_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONSAFEPATH": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class ChildProcess:
    """A child, killed together with its own children; `log` gets its stderr, appended."""

    def __init__(
        self, command: list[str], environment: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        # Open as long as the process runs.
        self._log = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self._process = subprocess.Popen(
            command, stderr=self._log, env=environment, start_new_session=True, **pipes
        )
        self._unread = b""

    def send(self, job: Any) -> None:
        assert self._process.stdin is not None
        # A dead child shows by its exit code.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def messages(self) -> list[Message]:
        """New messages since the last call."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(descriptor, 1 << 16):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A child that waits in a driver ends later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for file in filter(None, (self._process.stdin, self._process.stdout, self._log)):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def last_words(self) -> str:
        """Its last line on stderr."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no message")
