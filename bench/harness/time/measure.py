"""Jobs in a child process: an implementation that breaks it is excluded, and the rest continues.

`run_all` and `tune` measure with `measure` in the parent and `serve` in the child.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..results.report import BROKEN, DONE, LEFT
from .attention import REFERENCE
from .failures import LOST, DeviceLost, log, raise_if_lost, reason
from .jobs import Job
from .samples import TIMING, Bench
from .supervise import PREPARES, Child, Message, Tell, supervise

FINISHED, TIME_IS_UP = "finished", "the time was up"
# Phases before a job's implementations: their failure excludes none.
COMPILER = "the compiler"
NOBODY = (COMPILER, REFERENCE)


def measure(
    jobs: Sequence[Job],
    data: dict[str, Any],
    save: Callable[[], object],
    start: Callable[[list[str]], Child],
    left: Callable[[], float],
    *,
    grace: float = 0.0,
    heard: Callable[[str, Message], None] = lambda job, message: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Do the jobs missing in a report, and save it after each.

    Args:
        jobs: in their order.
        data: of a `Report`; jobs, results and broken are filled in.
        save: called after each job.
        start: starts a process that calls `serve` with the names of the remaining jobs.
        left: returns the seconds left; at 0 no job begins.
        grace: further seconds for a running job.
        heard: called with a job's name and each message about it.
        sleep, clock: of the host.

    Returns:
        FINISHED, TIME_IS_UP, or the fault.
    """
    statuses, broken = data["jobs"], data["broken"]

    def open_jobs() -> list[str]:
        ended = {name for name, job in statuses.items() if job["status"] in (DONE, BROKEN)}
        return [job.name for job in jobs if job.name not in ended]

    def request(name: str) -> dict[str, Any]:
        kinds = by_name[name].kinds
        out = {who: why for kind in kinds for who, why in broken.get(kind, {}).items()}
        return {"job": name, "broken": out, "alone": statuses.get(name, {}).get("alone", False)}

    by_name = {job.name: job for job in jobs}
    waiting = deque(open_jobs())
    how: dict[str, Any] = {"left": left, "grace": grace, "heard": heard}
    how |= {"sleep": sleep, "clock": clock}
    try:
        for ended in supervise(waiting, lambda: start(open_jobs()), request=request, **how):
            if ended.why:
                blame(data, by_name[ended.job], ended.at, ended.why)
                waiting.extendleft([ended.job] if ended.job in open_jobs() else [])
            else:
                last = ended.messages[-1]
                for record in last.get("records", ()):
                    if "environment" in record:
                        data.update(record)
                    else:
                        data["results"].append(record)
                statuses[ended.job] = {"status": DONE, "seconds": ended.seconds}
                if "failed" in last:
                    statuses[ended.job] = {"status": BROKEN, "reason": last["failed"]}
            save()
    except ChildProcessError as error:
        return str(error)
    statuses.update({name: {"status": LEFT, "reason": TIME_IS_UP} for name in waiting})
    save()
    return TIME_IS_UP if waiting else FINISHED


def blame(data: dict[str, Any], job: Job, who: str, why: str) -> None:
    """Record why a job's process ended, and how the job continues.

    All jobs of this kind exclude the running implementation. If implementations took turns, the job
    runs again with one after the other. If there is none to exclude, the job is abandoned.
    """
    alone = data["jobs"].get(job.name, {}).get("alone", False)
    broken = data["broken"].setdefault(job.kinds[-1], {})
    settled = {"status": LEFT, "reason": f"{who} {why}", "alone": alone or who == TIMING}
    if who in NOBODY or who in broken or (who == TIMING and alone):
        settled["status"] = BROKEN
    elif who != TIMING:
        broken[who] = f"{why} (in {job.name})"
    data["jobs"][job.name] = settled


def serve(
    jobs: Iterable[Job],
    bench: Bench,
    tell: Tell,
    requests: Iterable[Mapping[str, Any]],
    ready: Callable[[str], object] = lambda name: None,
) -> int:
    """Do the requested jobs in a child; return the exit code.

    Args:
        requests: of each job its name; broken: implementation to how it broke an earlier process;
            alone: whether its implementations take no turns.
        tell: sends a message to the parent.
        ready: waits for the compilation of a job's kernels.
    """
    by_name = {job.name: job for job in jobs}
    for request in requests:
        at = COMPILER

        def announce(who: str, doing: str) -> None:
            nonlocal at
            at = who
            tell(at=who, doing=doing)

        announce(COMPILER, PREPARES)
        ready(request["job"])
        job, own = by_name[request["job"]], replace(bench, alone=request["alone"])
        try:
            try:
                records = job.run(own, request["broken"], announce)
                bench.timer.synchronize()
            except DeviceLost:
                raise
            except Exception as error:
                raise_if_lost(error, at, bench.timer.synchronize)
                log(job.name, error)
                tell(done=True, failed=reason(error))
            else:
                tell(done=True, records=records)
        except DeviceLost as lost:
            tell(at=lost.implementation, lost=lost.reason)
            return LOST
    return 0
