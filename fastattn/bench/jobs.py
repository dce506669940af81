"""Everything that a run measures, as a list of jobs, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..models.gpt import GPTConfig
from ..modules import CausalGQAttention
from . import overhead
from .attention import TIMED, UNSERVED, Bench, Record, release, run_case
from .cases import Case, gpu_cases
from .implementations import side_by_side
from .measure import Timing, compare
from .training_step import BACKENDS, as_dict, time_training_steps

Announce = Callable[[str], None]

# GPT-2 small's shape (Radford et al. 2019) with a vocabulary that is a multiple of 64.
GPT2_SMALL = GPTConfig(
    vocab_size=50304, context_length=1024, num_layers=12, num_heads=12, embed_dim=768
)


@dataclass(frozen=True)
class Job:
    """Something to measure.

    Args:
        name: unique in a run.
        run: measures it; given what to measure with, the implementations that are known to end
            the process, and whom to tell the name of each implementation before it runs.
    """

    name: str
    run: Callable[[Bench, Mapping[str, str], Announce], list[Record]]


def gpu_jobs(which: str) -> list[Job]:
    """The jobs of a case set, "quick" or "full", on a GPU.

    Raises:
        ValueError: there is no such set.
    """
    cases = [Job(case.name, partial(_attention, case)) for case in gpu_cases(which)]
    lengths = (1024, 4096) if which == "quick" else (1024, 4096, 16384)
    others = [
        Job("host cost of a call", _host_cost),
        *(Job(f"training-T{T}", partial(_training, T)) for T in lengths),
        Job("module-B8-T2048", _module),
        Job("first call", _first_call),
        Job("import", _import),
    ]
    # The aims come first, the rest of the sweeps last.
    return [*cases[:12], *others, *cases[12:]]


def _attention(
    case: Case, bench: Bench, broken: Mapping[str, str], announce: Announce
) -> list[Record]:
    return run_case(case, side_by_side(case.device), bench, broken=broken, announce=announce)


def record(family: str, name: str, implementation: str, **figures: Any) -> Record:
    """A record of a measurement that is not of one attention call."""
    case = {"family": family, "name": name}
    return {"case": case, "implementation": implementation, "status": TIMED, **figures}


def unserved(family: str, name: str, implementation: str, reason: str) -> Record:
    """A record of a measurement that could not be taken."""
    case = {"family": family, "name": name}
    return {"case": case, "implementation": implementation, "status": UNSERVED, "reason": reason}


def _host_cost(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    announce("the timing")
    costs = overhead.call_costs("cuda")
    return [
        record("overhead", "host cost of a call", name, host_us=round(us, 2))
        for name, us in costs.items()
    ]


def _first_call(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    announce("the timing")
    found = overhead.first_call_ms("cuda")
    return [
        record("overhead", f"first call, {name}", "fastattn-triton", first_call_ms=round(ms, 1))
        for name, ms in found.items()
    ]


def _import(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    announce("the timing")
    ms = round(overhead.import_ms(), 1)
    return [record("overhead", "import over torch and triton", "fastattn", import_ms=ms)]


def _training(T: int, bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    """16384 tokens a step at context T."""
    name = f"training-GPT2-small-T{T}"
    config = replace(GPT2_SMALL, context_length=T)
    records = []
    for backend in BACKENDS:
        announce(backend)
        if backend in broken:
            records.append(unserved("training", name, f"fastattn-{backend}", broken[backend]))
            continue
        try:
            timing = time_training_steps(
                config, batch_size=max(1, 16384 // T), backend=backend, device="cuda"
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            reason = " ".join(str(error).split())[:400]
            records.append(unserved("training", name, f"fastattn-{backend}", reason))
        else:
            records.append(record("training", name, f"fastattn-{backend}", **as_dict(timing)))
        release("cuda")
    return records


def _module(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    """A layer of width 2048 with 16 query heads on 4, forward and backward, in bf16."""
    announce("the timing")
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    works = {f"fastattn-{backend}": module_work(backend, x) for backend in BACKENDS}
    timings = compare(
        works, bench.timer, bench.effort, while_busy=bench.while_busy, sleep=bench.sleep
    )
    readings = bench.readings()
    name = "module-B8-T2048-C2048-H16:4 fwdbwd"
    return [
        record("module", name, implementation, ms=timing.to_dict(), **readings)
        if isinstance(timing, Timing)
        else unserved("module", name, implementation, str(timing)[:400])
        for implementation, timing in timings.items()
    ]


def module_work(backend: str, x: torch.Tensor, heads: tuple[int, int] = (16, 4)) -> Any:
    """Forward and backward of a `CausalGQAttention` layer on x [B, T, C], with one backend."""
    torch.manual_seed(0)
    layer = CausalGQAttention(
        x.shape[2], *heads, rotary="half", backend=backend, device=x.device, dtype=x.dtype
    )
    parameters = list(layer.parameters())
    upstream = torch.randn_like(x)
    return lambda: torch.autograd.grad(layer(x), parameters, upstream)
