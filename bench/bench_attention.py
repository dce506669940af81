"""Single calls of each implementation: forward, backward, padded, masks and decode.

`-k decode` selects a family. Checks that our peak memory is close to inputs, outputs and lse.
The harness times all calls, and pytest-benchmark shows its samples.
"""

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest

from fastattn.bench.cases.case import Case
from fastattn.bench.cases.correctness import Expected, expect
from fastattn.bench.cases.inputs import Implementation, make_inputs
from fastattn.bench.cases.registry import OURS
from fastattn.bench.time.attention import run_case
from fastattn.bench.time.failures import FAILED, TIMED, WRONG
from fastattn.bench.time.samples import Bench, Effort, HostTimer, gpu_bench

_MOST_MEMORY = 1.05  # of the least


@lru_cache(maxsize=1)
def _expected(case: Case) -> Expected:
    """Inputs of a case are alike in every call, so the oracle computes once for all that follow."""
    return expect(case, make_inputs(case))


@cache
def _bench(device: str) -> Bench:
    effort = Effort(target_ms=1000, least=5, most=20, pause=0)
    return gpu_bench("short") if device == "cuda" else Bench(HostTimer(), effort)


class _Samples:
    """Earlier samples, for a benchmark with the timer `clock`: each call takes one."""

    now = 0.0

    def __init__(self, ms: list[float]) -> None:
        self._left = iter(ms)

    def __call__(self) -> None:
        _Samples.now += next(self._left) / 1e3

    @staticmethod
    def clock() -> float:
        """Seconds."""
        return _Samples.now


@pytest.mark.benchmark(timer=_Samples.clock)
@pytest.mark.filterwarnings("ignore")  # of peers
def test_attention(
    benchmark: Any, request: pytest.FixtureRequest, case: Case, implementation: Implementation
) -> None:
    """A peer that fails or is wrong is skipped, as one that cannot serve the case."""
    option, bench = request.config.getoption, _bench(case.device)
    effort = replace(
        bench.effort,
        target_ms=min(bench.effort.target_ms, 1e3 * float(option("benchmark_max_time"))),
        least=min(bench.effort.least, option("benchmark_min_rounds")),
    )
    bench = replace(bench, effort=effort, expected=lambda case, _: _expected(case))
    benchmark.group = case.name
    (record,) = run_case(case, [implementation], bench)
    if record["status"] != TIMED:
        ours = implementation.name.startswith(OURS) and record["status"] in (WRONG, FAILED)
        (pytest.fail if ours else pytest.skip)(f"{implementation.name}: {record['reason']}")
    samples = bench.taken[implementation.name]
    benchmark.extra_info.update({n: x for n, x in record.items() if n not in ("case", "status")})
    benchmark.pedantic(_Samples(samples), rounds=len(samples))
    assert implementation.name != OURS or record.get("memory_ratio", 1.0) <= _MOST_MEMORY
