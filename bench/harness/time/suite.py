"""The process that measures for `run_all`.

python -c "from fastattn.bench.time.suite import main; main()" quick '["a job", ...]'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.launch import tiles
from .ahead import Ahead
from .jobs import gpu_jobs
from .measure import serve
from .samples import gpu_bench
from .supervise import Tell, talk


def main() -> None:
    """Do jobs of a case set on the current CUDA device; named jobs are compiled ahead."""
    which, names = sys.argv[1], json.loads(sys.argv[2])
    talk(lambda tell, requests: run(which, names, tell, requests))


def run(which: str, names: list[str], tell: Tell, requests: Iterator[Any]) -> int:
    """Do the work of the process; return its exit code."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    tell(ready=True)
    jobs = {job.name: job for job in gpu_jobs(which)}
    ahead = Ahead(tiles.current_arch())
    for name in names:
        ahead.submit(name, jobs[name].compiles)

    def ready(job: str) -> None:
        if (why_not := ahead.why_not(job, seconds=60.0)) is not None:
            # The launch compiles again, and raises.
            sys.stderr.write(f"ahead of {job}: {why_not}\n")

    try:
        return serve(jobs.values(), gpu_bench(which), tell, requests, ready)
    finally:
        ahead.close()
