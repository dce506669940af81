"""The process that measures: runs jobs one by one and saves after each.

    python -m fastattn.bench.suite --report results.json --set quick --seconds 300

It goes on where the report ends, so a run can be spread over several calls. What ends this process
without warning is found out by the one that supervises it (see `supervise`), from what the report
says was running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from . import facts
from .attention import Bench, DeviceLost
from .cases import SETS
from .jobs import Job, gpu_jobs
from .measure import Effort, compare, device_timer
from .report import BROKEN, DONE, LEFT, RUNNING, Report

# Exit codes: nothing left to do; no GPU; the device is lost and a new process may go on.
FINISHED, NO_GPU, LOST = 0, 2, 3
# What runs before or beside the implementations of a job; nothing can be left out for its sake.
NOBODY = ("", "the reference", "the timing")


def run_jobs(
    jobs: Iterable[Job],
    report: Report,
    bench: Bench,
    left: Callable[[], float],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the jobs that the report does not have yet, as long as there is time left.

    Returns:
        FINISHED, or LOST if a new process has to go on.
    """
    known = report.data["jobs"]
    for job in jobs:
        if known.get(job.name, {}).get("status") in (DONE, BROKEN):
            continue
        if left() <= 0:
            known[job.name] = {"status": LEFT, "reason": "the time was up"}
            continue
        begin = clock()
        outcome = _run_job(job, report, bench)
        if outcome is LOST:
            return LOST
        known[job.name]["seconds"] = round(clock() - begin, 2)
        report.save()
    report.save()
    return FINISHED


def _run_job(job: Job, report: Report, bench: Bench) -> int:
    state = report.data["jobs"][job.name] = {"status": RUNNING}

    def announce(implementation: str) -> None:
        state["at"] = implementation
        report.save()

    announce("")
    broken = report.data["broken"].get(job.name, {})
    try:
        records = job.run(bench, broken, announce)
    except DeviceLost as lost:
        blame(report, job.name, lost.implementation, f"broke the device: {lost.reason}")
        report.save()
        return LOST
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        report.data["jobs"][job.name] = {"status": BROKEN, "reason": reason}
        return FINISHED
    report.data["results"] += records
    report.data["jobs"][job.name] = {"status": DONE}
    return FINISHED


def blame(report: Report, job: str, implementation: str, reason: str) -> None:
    """Leave an implementation out of a job that it has ended, or give the job up."""
    broken = report.data["broken"].setdefault(job, {})
    if implementation in NOBODY or implementation in broken:
        report.data["jobs"][job] = {
            "status": BROKEN,
            "reason": f"{implementation} {reason}".strip(),
        }
    else:
        broken[implementation] = reason
        report.data["jobs"][job] = {"status": LEFT, "reason": f"{implementation} {reason}"}


def ceilings(bench: Bench) -> dict[str, float]:
    """What this GPU reaches at best here: a bf16 matrix product, a copy; and an empty sample.

    matmul_tflops of 8192 x 8192 x 8192 on normal data; copy_gbps in bytes read and written;
    empty_ms between two events with nothing between them, which every time contains.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    works = {
        "matmul": lambda: torch.mm(a, b),
        "copy": lambda: target.copy_(source),
        "nothing": lambda: None,
    }
    found = compare(works, bench.timer, bench.effort, while_busy=bench.while_busy)
    ms = {}
    for name, timing in found.items():
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
    """What a run on the current CUDA device measures with."""
    reader = facts.ClockReader()
    effort = Effort() if which == "quick" else Effort(target_ms=150, least=10, pause=0.5)
    return Bench(device_timer(), effort, while_busy=reader, readings=reader.take)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the current CUDA device; returns one of the exit codes above."""
    parser = argparse.ArgumentParser(prog="python -m fastattn.bench.suite")
    parser.add_argument("--report", type=Path, required=True, help="JSON file, made if missing")
    parser.add_argument("--set", choices=SETS, default="quick")
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device\n")
        return NO_GPU
    if arguments.report.exists():
        report = Report.load(arguments.report)
    else:
        report = Report.create(arguments.report, facts.command_line())
    bench = gpu_bench(arguments.set)
    if not report.data["environment"]:
        report.data["environment"] = facts.environment()
        report.save()
    if not report.data["ceilings"]:
        report.data["ceilings"] = ceilings(bench)
        report.save()
    return run_jobs(gpu_jobs(arguments.set), report, bench, lambda: deadline - time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
