"""Jobs of a run, the most important first: attention cases, host costs, training.

`main` is the process that measures them for `run_all`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels.launch import tiles
from ...models.gpt import GPTConfig
from ...training.step_timing import BACKENDS, as_dict, time_training_steps
from ..cases.case import AIMS, Case, gpu_cases, plain
from ..cases.registry import OURS, named, side_by_side
from . import environment, overhead
from .ahead import Ahead
from .attention import Record, run_case
from .failures import FAILED, TIMED, Failure, failure, release
from .measure import Run, serve
from .samples import Bench, Function, gpu_bench
from .supervise import PREPARES, RUNS, Tell, talk

# GPT-2 small's shape (Radford et al. 2019) with a vocabulary that is a multiple of 64.
GPT2_SMALL = GPTConfig(
    vocab_size=50304, context_length=1024, num_layers=12, num_heads=12, embed_dim=768
)


class Job(NamedTuple):
    """A measurement: what runs, its kinds (see `measure`), and calls whose kernels it launches."""

    run: Run
    kinds: tuple[str, ...]
    compiles: tuple[Case, ...] = ()


def main() -> None:
    """Do jobs of a case set on the current CUDA device; named jobs are compiled ahead."""
    which, names = sys.argv[1], json.loads(sys.argv[2])
    talk(lambda tell, requests: run(which, names, tell, requests))


def run(which: str, names: list[str], tell: Tell, requests: Iterator[Any]) -> int:
    """Do the work of the process; return its exit code."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    tell(ready=True)
    jobs = gpu_jobs(which)
    ahead = Ahead(tiles.current_arch())
    for name in names:
        ahead.submit(name, jobs[name].compiles)

    def ready(job: str) -> None:
        if (why_not := ahead.why_not(job, seconds=60.0)) is not None:
            # The launch compiles again, and raises.
            sys.stderr.write(f"ahead of {job}: {why_not}\n")

    runs = {name: job.run for name, job in jobs.items()}
    try:
        return serve(runs, gpu_bench(which), tell, requests, ready)
    finally:
        ahead.close()


def gpu_jobs(which: str) -> dict[str, Job]:
    """The jobs of a case set (see `cases.gpu_cases`) on a GPU, by name."""
    cases = []
    for case in gpu_cases(which):
        # A backward also runs the forward.
        kinds = ("forward",) if case.direction == "forward" else ("forward", "backward")
        kinds = ("decode",) if case.family == "decode" else kinds
        measure = partial(run_case, case, side_by_side(case.device))
        cases.append((case.name, Job(measure, kinds, (case,))))
    H, D = GPT2_SMALL.num_heads, GPT2_SMALL.head_dim
    training = {}
    for T in (1024, 4096) if which == "quick" else (1024, 4096, 16384):
        case = plain("forward_backward", 16384 // T, H, H, T, D, causal=True)
        training[f"training-T{T}"] = Job(partial(_training, T), ("training",), (case,))
    # Important cases, other measurements, then the rest of the sweeps.
    return {
        "environment": Job(_environment, ("environment",)),
        **dict(cases[:AIMS]),
        "host cost of a call": Job(_host_cost, ("host cost",)),
        **training,
        "first call": Job(_first_call, ("first call",)),
        "import": Job(_import, ("import",)),
        **dict(cases[AIMS:]),
    }


def _environment(bench: Bench) -> list[Record]:
    """The environment of the other records, see `environment.collect`, and limits of this GPU.

    matmul_tflops of 8192 x 8192 x 8192 on normal data in bf16; copy_gbps of bytes read and written;
    empty_ms between two successive events, an overhead of every time.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    works: dict[str, Function] = {
        "matmul": lambda: torch.mm(a, b),
        "copy": lambda: target.copy_(source),
        "nothing": lambda: None,
    }
    ms = {}
    for name, result in bench.compare(works).items():
        if isinstance(result, Failure):
            raise RuntimeError(result.reason)
        ms[name] = result["median"]
    ceilings = {
        "matmul_tflops": round(2 * 8192**3 / ms["matmul"] / 1e9, 1),
        "copy_gbps": round(2 * source.numel() / ms["copy"] / 1e6, 1),
        "empty_ms": ms["nothing"],
        **bench.readings,
    }
    return [{"environment": environment.collect(), "ceilings": ceilings}]


def record(family: str, name: str, implementation: str, **figures: Any) -> Record:
    """A record of a measurement other than a single attention call."""
    case = {"family": family, "name": name}
    return {"case": case, "implementation": implementation, "status": TIMED} | figures


def _host_cost(bench: Bench) -> list[Record]:
    name = "host cost of a call"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        costs = overhead.host_costs(overhead.calls("cuda")).items()
    return [record("overhead", name, call, host_us=round(us, 2)) for call, us in costs]


def _first_call(bench: Bench) -> list[Record]:
    of = {f"first call, {cache}": ms for cache, ms in overhead.first_call_ms().items()}
    return [record("overhead", name, OURS, first_call_ms=round(of[name], 1)) for name in of]


def _import(bench: Bench) -> list[Record]:
    ms = round(overhead.import_ms(), 1)
    return [record("overhead", "import over torch and triton", OURS, import_ms=ms)]


def _training(T: int, bench: Bench) -> list[Record]:
    """Training with 16384 tokens per step at context T."""
    name = f"training-T{T}, GPT-2 small"
    config = replace(GPT2_SMALL, context_length=T)
    records = []
    for backend in BACKENDS:
        implementation = named(backend)
        if implementation in bench.broken:
            figures = Failure(FAILED, bench.broken[implementation])._asdict()
        else:
            bench.announce(implementation, PREPARES)
            issued = partial(bench.announce, implementation, RUNS)
            how: dict[str, Any] = {"batch_size": 16384 // T, "backend": backend, "issued": issued}
            try:
                figures = as_dict(time_training_steps(config, device="cuda", **how))
            except (ValueError, torch.OutOfMemoryError) as error:
                figures = failure(error, implementation, bench.timer.synchronize)._asdict()
        records.append(record("training", name, implementation, **figures))
        release()
    return records
