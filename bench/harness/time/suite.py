"""The process that measures: runs jobs one by one and saves after each.

    python -m fastattn.bench.time.suite --report results.json --set quick --seconds 300

It continues an existing report, so a run can be spread over several calls. If the process dies,
`supervise` finds in the report which implementation was running.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.launch import tiles
from ..cases.case import SETS
from ..results.report import BROKEN, DONE, LEFT, RUNNING, Report
from . import environment
from .ahead import Ahead
from .attention import REFERENCE
from .failures import LOST, DeviceLost, log, raise_if_lost, reason
from .jobs import Job, gpu_jobs
from .samples import PREPARES, TIMING, Bench, Effort, device_timer

# Exit codes beside LOST: nothing left to do; no GPU.
FINISHED, NO_GPU = 0, 2
# Seconds between two heartbeats of an implementation that stays in one phase.
_BEAT = 1.0
# What runs before a job's implementations: if it fails, there is none to leave out.
NOBODY = ("", REFERENCE)


def run_jobs(
    jobs: Iterable[Job],
    report: Report,
    bench: Bench,
    left: Callable[[], float],
    clock: Callable[[], float] = time.monotonic,
    ready: Callable[[str], object] = lambda name: None,
) -> int:
    """Run the jobs that the report lacks, while there is time left.

    Args:
        jobs: run in this order.
        report: continued, and saved after each job.
        bench: timer, effort and clocks.
        left: seconds left.
        clock: seconds.
        ready: waits until the kernels of the job of this name are compiled.

    Returns:
        FINISHED, or LOST if the device is lost and a new process must continue.
    """
    known = report.data["jobs"]
    for job in _to_do(jobs, report):
        if left() <= 0:
            known[job.name] = {"status": LEFT, "reason": "the time was up"}
            continue
        begin = clock()
        if _run_job(job, report, bench, ready, clock) == LOST:
            return LOST
        known[job.name]["seconds"] = round(clock() - begin, 2)
        report.save()
    report.save()
    return FINISHED


def _to_do(jobs: Iterable[Job], report: Report) -> list[Job]:
    known = report.data["jobs"]
    return [job for job in jobs if known.get(job.name, {}).get("status") not in (DONE, BROKEN)]


def _run_job(
    job: Job,
    report: Report,
    bench: Bench,
    ready: Callable[[str], object],
    clock: Callable[[], float],
) -> int:
    jobs = report.data["jobs"]
    alone = jobs.get(job.name, {}).get("alone", False)
    state = jobs[job.name] = {"status": RUNNING, "blamed": job.blamed, "alone": alone}

    saved = -math.inf

    def announce(who: str, doing: str) -> None:
        nonlocal saved
        # A save writes the whole report: one at each of many short steps would take longer.
        if (who, doing) == (state.get("at"), state.get("doing")) and clock() - saved < _BEAT:
            return
        saved = clock()
        state.update(at=who, doing=doing)
        report.save()

    announce("", PREPARES)
    ready(job.name)
    try:
        try:
            records = job.run(replace(bench, alone=alone), _left_out(job, report), announce)
            bench.timer.synchronize()
        except Exception as error:
            raise_if_lost(error, state["at"], bench.timer.synchronize)
            raise
    except DeviceLost as lost:
        state["at"] = lost.implementation
        blame(report, job.name, f"broke the device: {lost.reason}")
        report.save()
        return LOST
    except Exception as error:
        log(job.name, error)
        jobs[job.name] = {"status": BROKEN, "reason": reason(error)}
        return FINISHED
    report.data["results"] += records
    jobs[job.name] = {"status": DONE}
    return FINISHED


def _left_out(job: Job, report: Report) -> dict[str, str]:
    """The implementations that broke the process in a job of the same kind, and how."""
    broken = report.data["broken"]
    return {
        implementation: why
        for kind in job.kinds or (job.name,)
        for implementation, why in broken.get(kind, {}).items()
    }


def blame(report: Report, name: str, why: str) -> None:
    """Record why a running job's process ended, and how the job continues.

    The implementation at work is left out of this job and of all jobs of its kind. If the
    implementations took turns, the job runs again with one after the other. If there is none to
    leave out, the job is given up.
    """
    state = report.data["jobs"][name]
    who = state.get("at", "")
    broken = report.data["broken"].setdefault(state["blamed"], {})
    settled: dict[str, Any] = {"status": LEFT, "reason": f"{who} {why}".strip()}
    if who in NOBODY or who in broken or (who == TIMING and state["alone"]):
        settled["status"] = BROKEN
    elif who == TIMING:
        settled["alone"] = True
    else:
        broken[who] = f"{why} (in {name})"
    report.data["jobs"][name] = settled


def ceilings(bench: Bench) -> dict[str, float]:
    """Measured limits of this GPU: rates of a bf16 matrix product and a copy, and an empty sample.

    matmul_tflops of 8192 x 8192 x 8192 on normal data; copy_gbps in bytes read and written;
    empty_ms between two events with nothing between them, an overhead in every time.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    works = {
        "matmul": lambda: torch.mm(a, b),
        "copy": lambda: target.copy_(source),
        "nothing": lambda: None,
    }
    ms = {}
    for name, timing in bench.compare(works).items():
        if isinstance(timing, Exception):
            raise timing
        ms[name] = timing.median
    return {
        "matmul_tflops": round(2 * 8192**3 / ms["matmul"] / 1e9, 1),
        "copy_gbps": round(2 * source.numel() / ms["copy"] / 1e6, 1),
        "empty_ms": round(ms["nothing"], 5),
        **bench.readings(),
    }


def gpu_bench(which: str) -> Bench:
    """Timer, effort and clock readings of a run on the current CUDA device."""
    reader = environment.ClockReader()
    effort = Effort() if which == "quick" else Effort(target_ms=150, least=10, pause=0.5)
    return Bench(device_timer(), effort, while_busy=reader, readings=reader.take)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the current CUDA device; returns one of the exit codes above."""
    parser = argparse.ArgumentParser(prog="python -m fastattn.bench.time.suite")
    parser.add_argument("--report", type=Path, required=True, help="JSON file, made if missing")
    parser.add_argument("--set", choices=SETS, default="quick")
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device\n")
        return NO_GPU
    report = Report.at(arguments.report, environment.command_line())
    bench = gpu_bench(arguments.set)
    if not report.data["environment"]:
        report.data["environment"] = environment.collect()
        report.save()
    jobs = gpu_jobs(arguments.set)
    ahead = Ahead(tiles.current_arch())
    for job in _to_do(jobs, report):
        ahead.submit(job.name, job.compiles)

    def ready(job: str) -> None:
        if (why_not := ahead.why_not(job, seconds=60.0)) is not None:
            # Its launch compiles again, and raises there.
            sys.stderr.write(f"ahead of {job}: {why_not}\n")

    if not report.data["ceilings"]:
        report.data["ceilings"] = ceilings(bench)
        report.save()
    try:
        return run_jobs(jobs, report, bench, lambda: deadline - time.monotonic(), ready=ready)
    finally:
        ahead.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # With a lost context, destructors abort the process and change its exit code.
    os._exit(code)
