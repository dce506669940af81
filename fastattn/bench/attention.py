"""One case through every implementation: serve, check, weigh, time. Every outcome is a record."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..capture import record_cuda_graph
from . import figures
from .cases import Case
from .correctness import Expected, check, expect
from .inputs import Inputs, make_inputs
from .measure import Effort, Function, Timer, Timing, compare
from .serving import Attention, Implementation, Unserved

TIMED, UNSERVED, WRONG, FAILED, NO_MEMORY = (
    "timed",
    "cannot serve",
    "wrong",
    "failed",
    "out of memory",
)
Record = dict[str, Any]


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can be measured in this process.

    Args:
        implementation: who broke it.
        reason: what it raised.
    """

    def __init__(self, implementation: str, reason: str) -> None:
        super().__init__(f"{implementation}: {reason}")
        self.implementation, self.reason = implementation, reason


@dataclass
class Bench:
    """What cases are measured with.

    Args:
        timer: times single calls.
        effort: how long to measure each.
        while_busy: reads clocks while the device works.
        readings: what was read since the last call, for the records.
        sleep: waits that many seconds.
        expected: computes what results are held to.
    """

    timer: Timer
    effort: Effort = field(default_factory=Effort)
    while_busy: Callable[[], None] = lambda: None
    readings: Callable[[], dict[str, float]] = dict
    sleep: Callable[[float], None] = time.sleep
    expected: Callable[[Case, Inputs], Expected] = expect


def run_case(
    case: Case,
    implementations: Iterable[Implementation],
    bench: Bench,
    *,
    broken: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = lambda name: None,
) -> list[Record]:
    """Measure a case.

    Args:
        case: what to measure.
        implementations: by which.
        bench: with what.
        broken: implementations that ended the process when they were tried, and how.
        announce: told the name of each implementation before it runs for the first time.

    Returns:
        A record for each implementation, with implementation, status (one of the names above),
        reason unless it was timed, and else ms and the figures of `figures.figures`; peak_mib and
        memory_ratio on a GPU.

    Raises:
        DeviceLost: an implementation broke the device for all that follow.
    """
    outcomes: dict[str, Record] = {}
    works: dict[str, Function] = {}
    served = []
    for implementation in implementations:
        name = implementation.name
        outcomes[name] = {}
        if broken and name in broken:
            outcomes[name] = {"status": FAILED, "reason": broken[name]}
        elif (reason := implementation.why_not(case)) is not None:
            outcomes[name] = {"status": UNSERVED, "reason": reason}
        else:
            served.append(implementation)
    announce("the reference")
    try:
        inputs = make_inputs(case)
        expected = bench.expected(case, inputs)
    except Exception as error:
        outcomes.update({i.name: _failure(error, case, "the reference") for i in served})
        served = []
    for implementation in served:
        name = implementation.name
        announce(name)
        try:
            works[name], outcomes[name] = prepare(implementation, case, inputs, expected)
        except Exception as error:
            outcomes[name] = _failure(error, case, name)
    announce("the timing")
    timings = compare(
        works, bench.timer, bench.effort, while_busy=bench.while_busy, sleep=bench.sleep
    )
    readings = bench.readings()
    for name, timing in timings.items():
        if isinstance(timing, Timing):
            numbers = figures.figures(case, timing.median)
            outcomes[name].update(status=TIMED, ms=timing.to_dict(), **_rounded(numbers))
            outcomes[name].update(readings)
        else:
            outcomes[name] = _failure(timing, case, name)
    works.clear()
    release(case.device)
    described = case.to_dict()
    return [{"case": described, "implementation": n, **facts} for n, facts in outcomes.items()]


def prepare(
    implementation: Implementation, case: Case, inputs: Inputs, expected: Expected
) -> tuple[Function, Record]:
    """The function to time, after its results have passed the check.

    Returns:
        The function, and what the first call of it says of memory.

    Raises:
        Unserved, AssertionError, torch.OutOfMemoryError or whatever the implementation raises.
    """
    # What a peer warns of is no concern of the measurement.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention = implementation.prepare(case, inputs)
        work = work_of(case, attention, inputs)
        results = _results(case, attention, inputs)
        if implementation.check is None:
            check(case, *results, expected)
        else:
            implementation.check(case, inputs, results[0])
        memory = _memory(case, work_from_nothing(case, attention, inputs))
        if case.graph:
            work = record_cuda_graph(work)
    return work, memory


def work_of(case: Case, attention: Attention, inputs: Inputs) -> Function:
    """What runs inside the timer. For a backward case the forward has been run before."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.direction != "backward":
        return work_from_nothing(case, attention, inputs)
    o = attention(q, k, v)
    return lambda: torch.autograd.grad(o, (q, k, v), inputs.do, retain_graph=True)


def work_from_nothing(case: Case, attention: Attention, inputs: Inputs) -> Function:
    """A call that needs nothing from before: forward, or forward and backward."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), inputs.do)


def _results(
    case: Case, attention: Attention, inputs: Inputs
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.direction == "forward":
        with torch.no_grad():
            return attention(q, k, v), None
    o = attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.do)
    return o.detach(), (dq, dk, dv)


def _memory(case: Case, work: Function) -> Record:
    """Peak of torch's allocator in a call beyond what was held before, and what it amounts to.

    memory_ratio compares the peak and the inputs with inputs, outputs and lse.
    """
    if case.device != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    given = input_bytes(case)
    return {
        "peak_mib": round(peak / 2**20, 1),
        "memory_ratio": round((peak + given) / figures.least_memory(case), 3),
    }


def input_bytes(case: Case) -> int:
    """Bytes of q, k, v and, with a backward, of o's gradient: held before the call."""
    size = figures.element_size(case)
    queries = case.B * case.H_q * case.T_q * case.D * size
    keys = case.B * case.H_k * case.T_k * case.D * size
    return queries + 2 * keys + (0 if case.direction == "forward" else queries)


def _failure(error: Exception, case: Case, name: str) -> Record:
    if case.device == "cuda":
        _raise_if_lost(error, name)
    text = " ".join(f"{error}".split())[:400]
    if isinstance(error, Unserved) or "No available kernel" in text:
        return {"status": UNSERVED, "reason": text}
    if isinstance(error, torch.OutOfMemoryError):
        release(case.device)
        return {"status": NO_MEMORY, "reason": text}
    if isinstance(error, AssertionError):
        return {"status": WRONG, "reason": text}
    return {"status": FAILED, "reason": f"{type(error).__name__}: {text}"}


def _raise_if_lost(error: Exception, name: str) -> None:
    """After an illegal access every later call fails: find out before blaming the others."""
    try:
        torch.cuda.synchronize()
    except Exception as broken:
        raise DeviceLost(name, f"{type(error).__name__}: {error}"[:400]) from broken


def release(device: str) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}
