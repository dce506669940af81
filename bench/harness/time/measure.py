"""Jobs in a child process: an implementation that breaks it is excluded, and the rest continues.

`run_all` and `tune` measure with `measure` in the parent and `serve` in the child.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...testing.supervision import PREPARES, ChildProcess, Message, Tell, supervise
from ..results.report import BROKEN, DONE, LEFT
from .attention import REFERENCE, Record
from .failures import failure
from .samples import Bench

FINISHED, TIME_IS_UP = "finished", "the time was up"
# Phases before a job's implementations: their failure excludes none.
COMPILER = "the compiler"
NOBODY = (COMPILER, REFERENCE)
# A measurement with the instruments that it is given; returns its records.
Run = Callable[[Bench], list[Record]]


def measure(
    kinds: Mapping[str, tuple[str, ...]],
    data: dict[str, Any],
    save: Callable[[], object],
    start: Callable[[list[str]], ChildProcess],
    left: Callable[[], float],
    *,
    grace: float = 0.0,
    heard: Callable[[str, Message], None] = lambda job, message: None,
) -> str:
    """Do the jobs missing in a report, saved after each; return FINISHED, TIME_IS_UP or a fault.

    kinds: jobs in their order, with the classes of kernels that each runs, see `Case.kernels`. A
    job measures the last one: implementations that break its process are excluded from jobs with
    that class. start: starts a process that calls `serve` with the names of
    the remaining jobs. left, grace, heard: as in `supervise`.
    """
    statuses, broken = data["jobs"], data["broken"]

    def open_jobs() -> list[str]:
        ended = {name for name, job in statuses.items() if job["status"] in (DONE, BROKEN)}
        return [name for name in kinds if name not in ended]

    def request(name: str) -> dict[str, Any]:
        out = {who: why for kind in kinds[name] for who, why in broken.get(kind, {}).items()}
        return {"job": name, "broken": out}

    waiting = deque(open_jobs())
    how: dict[str, Any] = {"request": request, "heard": heard, "left": left, "grace": grace}
    try:
        for ended in supervise(waiting, lambda: start(open_jobs()), **how):
            last, name = ended.messages[-1], ended.job
            if ended.why:
                # All jobs of this kind exclude who was running. With none to exclude, it is over.
                out = broken.setdefault(kinds[name][-1], {})
                nobody = ended.at in NOBODY or ended.at in out
                if not nobody:
                    out[ended.at] = f"{ended.why} (in {name})"
                    waiting.appendleft(name)
                reason = f"{ended.at} {ended.why}"
                statuses[name] = {"status": BROKEN if nobody else LEFT, "reason": reason}
            elif "failed" in last:
                statuses[name] = {"status": BROKEN, "reason": last["failed"]}
            else:
                statuses[name] = {"status": DONE}
                for record in last.get("records", ()):
                    if {"environment", "tests"} & record.keys():
                        data.update(record)
                    else:
                        data["results"].append(record)
            save()
    except ChildProcessError as error:
        return str(error)
    statuses.update({name: {"status": LEFT, "reason": TIME_IS_UP} for name in waiting})
    save()
    return TIME_IS_UP if waiting else FINISHED


def serve(
    runs: Mapping[str, Run],
    bench: Bench,
    tell: Tell,
    requests: Iterable[Mapping[str, Any]],
    ready: Callable[[str], object] = lambda name: None,
) -> None:
    """Do the requested jobs in a child.

    requests: of each job its name, and the broken implementations with reasons. ready: waits for
    the compilation of a job's kernels. Raises an error if the CUDA context is lost: the last
    implementation that was announced broke it.
    """

    def announce(who: str, doing: str) -> None:
        tell(at=who, doing=doing)

    for request in requests:
        name = request["job"]
        sys.stderr.write(f"\n{name}\n")  # a heading in the log
        announce(COMPILER, PREPARES)
        ready(name)
        own = replace(bench, announce=announce, broken=request["broken"])
        try:
            records = runs[name](own)
            own.timer.synchronize()
        except Exception as error:
            tell(done=True, failed=failure(error, name, own.timer.synchronize).reason)
        else:
            tell(done=True, records=records)
