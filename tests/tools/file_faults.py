"""Processes that are killed, or get an error, at their n-th operation on files."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

_EVENTS = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"),
    *("os.scandir", "os.listdir"),
}


def arm(n: int, mode: Literal["kill", "fail"] = "kill", under: str = "") -> list[int]:
    """Kill this process at its n-th operation on files, or let that fail as on a full disk.

    Audit events come before their operation; fsync, which has none, is replaced. It is not undone.

    Args:
        n: of the operation, from 1; others = none.
        mode: what happens then.
        under: part of the names of the files that count.

    Returns:
        The count of operations so far, kept up to date.
    """
    count, flush = [0], os.fsync

    def operation() -> None:
        count[0] += 1
        if count[0] == n and mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count[0] == n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(fd: Any) -> None:
        operation()
        flush(fd)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and under in str(args[0]):
            operation()

    os.fsync = fsync
    sys.addaudithook(hook)
    return count


def fork(work: Callable[[], int | None]) -> int:
    """The id of a forked process that does the work and ends with what it returns, 1 if it raises.

    See `status_of`.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            status = work() or 0
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    """Wait for a process of `fork`; its exit status, or -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
