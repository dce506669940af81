"""Check, measure memory and time each implementation on a case; each outcome is a record."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...testing.supervision import PREPARES, RUNS
from ...tracing import record_cuda_graph
from ..cases import figures
from ..cases.case import Case
from ..cases.correctness import Expected, check
from ..cases.inputs import Attention, Implementation, Inputs, make_inputs
from .failures import FAILED, TIMED, UNSERVED, Failure, failure, release
from .samples import Bench, Function, summary

Record = dict[str, Any]
Results = tuple[Tensor, tuple[Tensor, ...] | None]
# Announced while the oracle computes the expected results.
REFERENCE = "the reference"


def run_case(case: Case, implementations: Iterable[Implementation], bench: Bench) -> list[Record]:
    """Measure implementations on a case, in this order; a record for each.

    A record has implementation, status (see `failures`) and reason; if timed, ms and the figures of
    `figures.figures` in place of reason; peak_mib and memory_ratio on a GPU; and the kernels that
    `auto` chose, which are excluded, or blamed, as the backend that has them.
    """
    outcomes: dict[str, Record] = {}
    served: list[Implementation] = []
    for one in implementations:
        if (why_not := one.serves(case)) is not None:
            outcomes[one.name] = Failure(UNSERVED, why_not)._asdict()
        elif one.chooses is None and one.name in bench.broken:
            outcomes[one.name] = Failure(FAILED, bench.broken[one.name])._asdict()
        else:
            outcomes[one.name] = {}
            served.append(one)
    results: dict[str, Any]
    bench.announce(REFERENCE, PREPARES)
    try:
        inputs = make_inputs(case)
        expected = bench.expected(case, inputs)
        bench.timer.synchronize()
        called = {one.name: one.chooses(case, inputs) for one in served if one.chooses}
    except Exception as error:
        failed = failure(error, REFERENCE, bench.timer.synchronize)
        results = {one.name: failed for one in served}
    else:
        results, prepares = {}, {}
        for one in served:
            who = called.get(one.name, one.name)
            if one.chooses is not None:
                outcomes[one.name]["kernels"] = who
            if who in bench.broken:
                results[one.name] = Failure(FAILED, bench.broken[who])
                continue
            issued, outcome = partial(bench.announce, who, RUNS), outcomes[one.name]
            prepares[one.name] = partial(_ready, one, case, inputs, expected, issued, outcome)
        results |= bench.samples(prepares, called)
    for name, result in results.items():
        if isinstance(result, Failure):
            outcomes[name] |= result._asdict()
        else:
            ms = summary(result)
            numbers = figures.figures(case, ms["median"]).items()
            outcomes[name].update(status=TIMED, ms=ms)
            outcomes[name].update({n: float(f"{x:.4g}") for n, x in numbers}, **bench.readings)
    release()
    described = case.to_dict()
    return [{"case": described, "implementation": n, **facts} for n, facts in outcomes.items()]


def _ready(
    one: Implementation,
    case: Case,
    inputs: Inputs,
    expected: Expected,
    issued: Callable[[], object],
    outcome: Record,
) -> Function:
    """The function to time; its memory is added to the outcome."""
    work, memory = prepare(one, case, inputs, expected, issued)
    outcome.update(memory)
    return work


def prepare(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    expected: Expected,
    issued: Callable[[], object] = lambda: None,
) -> tuple[Function, Record]:
    """Check an implementation against the oracle; return the function to time and its memory.

    issued: called after compilation, before the wait for the first results.
    """
    # Peers' warnings would clutter the log.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention = implementation.prepare(case, inputs)
        work = work_of(case, attention, inputs)
        results = call(case, attention, inputs)
        issued()
        _check(implementation, case, inputs, results, expected)
        memory = _memory(case, partial(call, case, attention, inputs))
        if case.graph:
            work, replayed = _captured(case, work)
            _check(implementation, case, inputs, (replayed, None), expected)
    return work, memory


def _check(
    implementation: Implementation, case: Case, inputs: Inputs, results: Results, expected: Expected
) -> None:
    o, gradients = results
    if implementation.check is None:
        check(case, o, gradients, expected)
    else:
        implementation.check(case, inputs, o)


def _captured(case: Case, work: Function) -> tuple[Function, Tensor]:
    """`work` as the replay of a CUDA graph, and the output of a replay."""
    assert case.direction == "forward", "graphs are measured forward only"
    outputs: list[Any] = []  # kept: no output may be freed during capture
    replay = record_cuda_graph(lambda: outputs.append(work()))
    o: Tensor = outputs[-1][0]
    # NaN in the outputs detects a replay that writes nothing.
    o.fill_(math.nan)
    replay()
    return replay, o


def work_of(case: Case, attention: Attention, inputs: Inputs) -> Function:
    """The timed call. For a backward case the forward has run already."""
    if case.direction != "backward":
        return partial(call, case, attention, inputs)
    leaves = (inputs.q, inputs.k, inputs.v)
    o = attention(*leaves)
    return lambda: torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)


def call(case: Case, attention: Attention, inputs: Inputs) -> Results:
    """o, and the gradients if the case has them."""
    leaves = (inputs.q, inputs.k, inputs.v)
    if case.direction == "forward":
        with torch.no_grad():
            return attention(*leaves), None
    o = attention(*leaves)
    return o.detach(), torch.autograd.grad(o, leaves, inputs.do)


def _memory(case: Case, work: Function) -> Record:
    """Peak memory of a call in addition to its inputs, by torch's allocator.

    memory_ratio is (peak + inputs) / `figures.least_memory` (inputs, outputs and lse).
    """
    if case.device != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    ratio = (peak + figures.input_bytes(case)) / figures.least_memory(case)
    return {"peak_mib": round(peak / 2**20, 1), "memory_ratio": round(ratio, 3)}
