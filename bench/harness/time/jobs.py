"""Jobs of a run, the most important first: attention cases, host costs, layers, training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...models.gpt import GPTConfig
from ...modules.self_attention import CausalGQAttention
from ...training.step_timing import BACKENDS, as_dict, time_training_steps
from ..cases.case import AIMS, Case, gpu_cases
from ..cases.registry import OURS, named, side_by_side
from . import environment, overhead
from .attention import TIMED, UNSERVED, Record, release, run_case
from .failures import reason
from .samples import Announce, Bench, Timing
from .supervise import PREPARES, RUNS

# GPT-2 small's shape (Radford et al. 2019) with a vocabulary that is a multiple of 64.
GPT2_SMALL = GPTConfig(
    vocab_size=50304, context_length=1024, num_layers=12, num_heads=12, embed_dim=768
)
# Attention of the layer in `_module`.
_MODULE = Case("backward", "forward_backward", 8, 16, 4, 2048, 2048, 128, causal=True)
_NAMES = {named(backend): backend for backend in BACKENDS}
Run = Callable[[Bench, Mapping[str, str], Announce], list[Record]]


@dataclass(frozen=True)
class Job:
    """A measurement.

    Args:
        name: unique in a run.
        run: takes a `Bench`, the broken implementations with reasons, and a progress callback (see
            `Bench.samples`).
        kinds: parts of an implementation that it runs, e.g. ("forward", "backward"); it measures
            the last one. Jobs of that kind exclude implementations that break the process here.
            Default: the name alone.
        compiles: attention calls whose kernels it launches.
    """

    name: str
    run: Run
    kinds: tuple[str, ...] = ()
    compiles: tuple[Case, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", self.kinds or (self.name,))


def gpu_jobs(which: str) -> list[Job]:
    """The jobs of a case set (see `cases.gpu_cases`) on a GPU.

    Raises:
        ValueError: there is no such set.
    """
    cases = [
        Job(case.name, partial(_attention, case), kinds(case), (case,)) for case in gpu_cases(which)
    ]
    lengths = (1024, 4096) if which == "quick" else (1024, 4096, 16384)
    training = (
        Job(f"training-T{T}", partial(_training, T), ("training",), (_training_case(T),))
        for T in lengths
    )
    module = Job("module-B8-T2048", _module, compiles=(_MODULE,))
    others = [Job("host cost of a call", _host_cost), *training, module]
    others += [Job("first call", _first_call), Job("import", _import)]
    # Important cases, other measurements, then the rest of the sweeps.
    return [Job("environment", _environment), *cases[:AIMS], *others, *cases[AIMS:]]


def kinds(case: Case) -> tuple[str, ...]:
    """Kinds of work in a case: a backward also runs the forward."""
    if case.family == "decode":
        return ("decode",)
    return ("forward",) if case.direction == "forward" else ("forward", "backward")


def _environment(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    """Record of the environment of the other records: see `environment.collect` and `ceilings`."""
    return [{"environment": environment.collect(), "ceilings": ceilings(bench)}]


def ceilings(bench: Bench) -> dict[str, float]:
    """Measured limits of this GPU: a bf16 matrix product, a copy, an empty sample.

    matmul_tflops of 8192 x 8192 x 8192 on normal data; copy_gbps of bytes read and written;
    empty_ms between two successive events, an overhead of every time.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    works: dict[str, Callable[[], object]] = {
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


def _attention(
    case: Case, bench: Bench, broken: Mapping[str, str], announce: Announce
) -> list[Record]:
    return run_case(case, side_by_side(case.device), bench, broken=broken, announce=announce)


def record(family: str, name: str, implementation: str, **figures: Any) -> Record:
    """A record of a measurement other than a single attention call."""
    case = {"family": family, "name": name}
    return {"case": case, "implementation": implementation, "status": TIMED, **figures}


def unserved(family: str, name: str, implementation: str, reason: str) -> Record:
    """A record of an impossible measurement, with the reason."""
    return record(family, name, implementation, reason=reason) | {"status": UNSERVED}


def _host_cost(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    name = "host cost of a call"
    costs = overhead.call_costs().items()
    return [record("overhead", name, call, host_us=round(us, 2)) for call, us in costs]


def _first_call(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    return [
        record("overhead", f"first call, {cache}", OURS, first_call_ms=round(ms, 1))
        for cache, ms in overhead.first_call_ms("cuda").items()
    ]


def _import(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    ms = round(overhead.import_ms(), 1)
    return [record("overhead", "import over torch and triton", OURS, import_ms=ms)]


def _training_case(T: int) -> Case:
    """The attention of a training step."""
    H, D = GPT2_SMALL.num_heads, GPT2_SMALL.head_dim
    return Case("backward", "forward_backward", 16384 // T, H, H, T, T, D, causal=True)


def _training(T: int, bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    """Training with 16384 tokens per step at context T."""
    name = f"training-T{T}, GPT-2 small"
    config = replace(GPT2_SMALL, context_length=T)
    records = [unserved("training", name, n, broken[n]) for n in _NAMES if n in broken]
    for implementation in (n for n in _NAMES if n not in broken):
        announce(implementation, PREPARES)
        try:
            timing = time_training_steps(
                config,
                batch_size=max(1, 16384 // T),
                backend=_NAMES[implementation],
                device="cuda",
                issued=partial(announce, implementation, RUNS),
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            records.append(unserved("training", name, implementation, reason(error)))
        else:
            records.append(record("training", name, implementation, **as_dict(timing)))
        release("cuda")
    return records


def _module(bench: Bench, broken: Mapping[str, str], announce: Announce) -> list[Record]:
    """Forward and backward of a layer of width 2048 with 16 query heads on 4, in bf16."""
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    name = "module-B8-T2048-C2048-H16:4 fwdbwd"
    works = {n: _layer(backend, x) for n, backend in _NAMES.items() if n not in broken}
    timings = bench.compare(works, announce)
    readings = bench.readings()
    records = [unserved("module", name, n, broken[n]) for n in _NAMES if n in broken]
    for n, timing in timings.items():
        if isinstance(timing, Timing):
            records.append(record("module", name, n, ms=timing.to_dict(), **readings))
        else:
            records.append(unserved("module", name, n, reason(timing)))
    return records


def _layer(backend: str, x: torch.Tensor) -> Any:
    """Forward and backward of a `CausalGQAttention` layer on x [B, T, C], with one backend."""
    torch.manual_seed(0)
    layer = CausalGQAttention(
        x.shape[2], 16, 4, rotary="half", backend=backend, device=x.device, dtype=x.dtype
    )
    parameters = list(layer.parameters())
    upstream = torch.randn_like(x)
    return lambda: torch.autograd.grad(layer(x), parameters, upstream)
