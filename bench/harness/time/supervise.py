"""Supervisor of the measuring process: a crash or a hang costs one implementation, not the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..results.report import BROKEN, DONE, LEFT, Report
from .attention import REFERENCE
from .failures import LOST
from .jobs import Job
from .samples import PREPARES, RUNS, TIMING
from .suite import FINISHED, NO_GPU

_MOST_STARTS = 25
# Seconds without a message after which a process is killed. Compilation takes long; kernels do not.
STALL = {PREPARES: 90.0, RUNS: 25.0}
TIME_IS_UP = "the time was up"
# What runs before a job's implementations: if it fails, there is none to leave out.
NOBODY = ("", REFERENCE)


class Child(Protocol):
    """A process that measures: its exit code, what it told since the last call, and its end."""

    def poll(self) -> int | None: ...

    def messages(self) -> list[dict[str, Any]]: ...

    def kill(self) -> None: ...


def supervise(
    jobs: Sequence[Job],
    report: Report,
    start: Callable[[dict[str, Any]], Child],
    left: Callable[[], float],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Measure the jobs that a report lacks, and save it after each.

    Args:
        jobs: in their order.
        start: starts the process of `suite`, given its plan.
        left: seconds left.
        sleep, clock: of the host.

    Returns:
        How it ended: "finished", "the time was up", "no GPU", or what went wrong.
    """
    known = report.data["jobs"]
    for _ in range(_MOST_STARTS):
        names = [j.name for j in jobs if known.get(j.name, {}).get("status") not in (DONE, BROKEN)]
        if not names or left() <= 0:
            known.update({name: {"status": LEFT, "reason": TIME_IS_UP} for name in names})
            report.save()
            return TIME_IS_UP if names else "finished"
        alone = [name for name in names if known.get(name, {}).get("alone")]
        new = not report.data["environment"]
        plan = {"jobs": names, "broken": report.data["broken"], "alone": alone, "new": new}
        child = start(plan)
        watch = _Watch(report, clock)
        ended = watch.follow(child, left, sleep)
        child.kill()  # children that outlive it
        if ended == NO_GPU:
            return "no GPU"
        if ended not in (FINISHED, TIME_IS_UP):
            why = ended if isinstance(ended, str) else f"ended the process with exit code {ended}"
            if watch.job:
                blame(report, next(j for j in jobs if j.name == watch.job), watch.at, why)
            elif not watch.ended_jobs:
                return f"the measuring process {why}, with nothing running"
        report.save()
    return f"the measuring process was started {_MOST_STARTS} times"


class _Watch:
    """State of a child by its messages. job: the one that runs, or ""; at: who is at work."""

    def __init__(self, report: Report, clock: Callable[[], float]) -> None:
        self._report, self._clock = report, clock
        self._heard = self._begun = clock()
        self.job, self.at, self._doing, self._lost = "", "", PREPARES, ""
        self.ended_jobs = 0

    def follow(
        self, child: Child, left: Callable[[], float], sleep: Callable[[float], None]
    ) -> int | str:
        """Wait until a child ends, or end it; its exit code, or why it was ended or lost."""
        while True:
            code = child.poll()  # before its last messages are read
            for message in child.messages():
                self._take(message)
            limit = STALL[self._doing]
            if code is not None:
                return f"broke the device: {self._lost}" if code == LOST and self._lost else code
            if left() <= 0:
                return TIME_IS_UP
            if self._clock() - self._heard > limit:
                return f"made no progress for {limit:.0f} s"
            sleep(0.2)

    def _take(self, message: dict[str, Any]) -> None:
        self._heard, data = self._clock(), self._report.data
        self.at, self._doing = message.get("at", self.at), message.get("doing", self._doing)
        self._lost = message.get("lost", "")
        if "job" in message:
            self.job, self._begun = message["job"], self._heard
        elif "environment" in message:
            data.update(message)
            self._report.save()
        elif "records" in message or "failed" in message:
            data["results"] += message.get("records", [])
            seconds = round(self._heard - self._begun, 2)
            done = {"status": DONE, "seconds": seconds}
            failed = {"status": BROKEN, "reason": message.get("failed")}
            data["jobs"][self.job] = done if "records" in message else failed
            self.job, self._doing = "", PREPARES
            self.ended_jobs += 1
            self._report.save()


def blame(report: Report, job: Job, who: str, why: str) -> None:
    """Record why a running job's process ended, and how the job continues.

    The implementation at work is left out of this job and of all jobs of its kind. If the
    implementations took turns, the job runs again with one after the other. If there is none to
    leave out, the job is given up.
    """
    alone = report.data["jobs"].get(job.name, {}).get("alone", False)
    broken = report.data["broken"].setdefault(job.kinds[-1], {})
    settled: dict[str, Any] = {"status": LEFT, "reason": f"{who} {why}".strip()}
    if who in NOBODY or who in broken or (who == TIMING and alone):
        settled["status"] = BROKEN
    elif who == TIMING:
        settled["alone"] = True
    else:
        broken[who] = f"{why} (in {job.name})"
    report.data["jobs"][job.name] = settled
