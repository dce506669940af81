"""The process that measures: runs jobs one by one, and tells of each in lines of JSON.

    python -m fastattn.bench.time.suite quick '{"jobs": [...], "broken": {}, "alone": []}'

Messages: `job` starts; `at` names the implementation at work, `doing` its phase; `records` or
`failed` end the job; `lost` is why the device is lost. `ceilings` come with the environment, if the
plan is `new`. `supervise` listens, and starts another process where this one ends early.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels.launch import tiles
from . import environment
from .ahead import Ahead
from .failures import LOST, DeviceLost, log, raise_if_lost, reason
from .jobs import Job, gpu_jobs
from .samples import PREPARES, Bench, gpu_bench

FINISHED, NO_GPU = 0, 2  # exit codes beside LOST
Tell = Callable[..., None]


def run_jobs(
    jobs: Sequence[Job],
    plan: Mapping[str, Any],
    bench: Bench,
    tell: Tell,
    ready: Callable[[str], object] = lambda name: None,
) -> int:
    """Run jobs in their order; the exit code.

    Args:
        plan: broken: kind of job to implementation to how it broke an earlier process (see
            `Job.kinds`). alone: jobs whose implementations take no turns.
        tell: sends a message to the parent.
        ready: waits until the kernels of the job of this name are compiled.
    """
    for job in jobs:
        left_out = {
            implementation: why
            for kind in job.kinds
            for implementation, why in plan["broken"].get(kind, {}).items()
        }
        try:
            _run(job, replace(bench, alone=job.name in plan["alone"]), left_out, tell, ready)
        except DeviceLost as lost:
            tell(at=lost.implementation, lost=lost.reason)
            return LOST
    return FINISHED


def _run(
    job: Job,
    bench: Bench,
    left_out: Mapping[str, str],
    tell: Tell,
    ready: Callable[[str], object],
) -> None:
    at = ""

    def announce(who: str, doing: str) -> None:
        nonlocal at
        at = who
        tell(at=who, doing=doing)

    tell(job=job.name)
    announce("", PREPARES)
    ready(job.name)
    try:
        records = job.run(bench, left_out, announce)
        bench.timer.synchronize()
    except DeviceLost:
        raise
    except Exception as error:
        raise_if_lost(error, at, bench.timer.synchronize)
        log(job.name, error)
        tell(failed=reason(error))
    else:
        tell(records=records)


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


def main(which: str, plan: Mapping[str, Any], tell: Tell) -> int:
    """Measure jobs of a case set on the current CUDA device; the exit code."""
    if not torch.cuda.is_available():
        return NO_GPU
    bench = gpu_bench(which)
    by_name = {job.name: job for job in gpu_jobs(which)}
    jobs = [by_name[name] for name in plan["jobs"]]
    ahead = Ahead(tiles.current_arch())
    for job in jobs:
        ahead.submit(job.name, job.compiles)

    def ready(job: str) -> None:
        if (why_not := ahead.why_not(job, seconds=60.0)) is not None:
            # Its launch compiles again, and raises there.
            sys.stderr.write(f"ahead of {job}: {why_not}\n")

    try:
        if plan["new"]:
            tell(environment=environment.collect(), ceilings=ceilings(bench))
        return run_jobs(jobs, plan, bench, tell, ready)
    finally:
        ahead.close()


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed

    def _tell(**message: Any) -> None:
        out.write(json.dumps(message, allow_nan=False) + "\n")
        out.flush()

    code = main(sys.argv[1], json.loads(sys.argv[2]), _tell)
    sys.stderr.flush()
    # With a lost context, destructors abort the process and change its exit code.
    os._exit(code)
