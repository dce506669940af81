"""Fixtures of the benchmarks: the cases for this machine, and their runs.

The harness times all calls, and pytest-benchmark shows its samples. Kernels are compiled, and run
on a GPU only.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, the name of another distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

from fastattn.bench.cases.case import SETS, cpu_cases, gpu_cases  # noqa: E402
from fastattn.bench.cases.figures import figures  # noqa: E402
from fastattn.bench.cases.inputs import make_inputs  # noqa: E402
from fastattn.bench.cases.registry import OURS, side_by_side  # noqa: E402
from fastattn.bench.time import samples  # noqa: E402
from fastattn.bench.time.attention import prepare, release  # noqa: E402

_MOST_MEMORY = 1.05  # of the least


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case-set", choices=SETS, default="quick", help="on a GPU (quick)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests of (case, implementation) with every pair."""
    if {"case", "implementation"} <= set(metafunc.fixturenames):
        pairs = [
            pytest.param(
                case,
                implementation,
                id=f"{case.name}-{implementation.name}",
                marks=pytest.mark.gpu if case.device == "cuda" else (),
            )
            for case in [*gpu_cases(metafunc.config.getoption("--case-set")), *cpu_cases()]
            for implementation in side_by_side(case.device)
        ]
        metafunc.parametrize(("case", "implementation"), pairs)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees no CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replay the samples of the harness."""
    for item in items:
        if "run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=_Samples.clock))


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


class _Workbench:
    """Shared state of a session: timers, and the inputs of the current case."""

    def __init__(self) -> None:
        self._case: Any = None
        self._prepared: Any = None

    @cache  # noqa: B019  there is one workbench
    def bench(self, device: str) -> samples.Bench:
        if device == "cuda":
            return samples.gpu_bench("quick")
        effort = samples.Effort(target_ms=1000, least=5, most=20, pause=0)
        return samples.Bench(samples.HostTimer(), effort)

    def prepared(self, case: Any) -> Any:
        """Inputs and expected results of a case; those of the last case are dropped."""
        if case != self._case:
            self._case = self._prepared = None
            release(case.device)
            inputs = make_inputs(case)
            expected = self.bench(case.device).expected(case, inputs)
            self._case, self._prepared = case, (inputs, expected)
        return self._prepared


@pytest.fixture(scope="session")
def workbench() -> _Workbench:
    return _Workbench()


@pytest.fixture
def quiet_peers() -> Iterator[None]:
    """Warnings are errors in this suite, except in other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def run(
    benchmark: Any, workbench: _Workbench, quiet_peers: None, request: pytest.FixtureRequest
) -> Callable[[Any, str], float]:
    """Times a function on "cuda" or "cpu" within pytest-benchmark's options: median ms."""
    longest = 1e3 * float(request.config.getoption("benchmark_max_time"))
    fewest = request.config.getoption("benchmark_min_rounds")

    def measure(function: Callable[[], object], device: str) -> float:
        bench = workbench.bench(device)
        target, least = min(bench.effort.target_ms, longest), min(bench.effort.least, fewest)
        effort = replace(bench.effort, target_ms=target, least=least)
        timed = replace(bench, effort=effort).samples({"it": function})["it"]
        if isinstance(timed, Exception):
            raise timed
        timing = samples.Timing.of(timed)
        benchmark.extra_info["ms"] = timing.to_dict()
        benchmark.pedantic(_Samples(timed), rounds=len(timed))
        return timing.median

    return measure


@pytest.fixture
def run_attention(
    benchmark: Any, run: Callable[[Any, str], float], workbench: _Workbench
) -> Callable[[Any, Any], None]:
    """Checks one implementation on one case, benchmarks it, and records its figures.

    Skips an implementation that cannot serve the case, and a peer that fails or is wrong.
    """

    def measure(case: Any, implementation: Any) -> None:
        benchmark.group = case.name
        why_not = implementation.why_not(case)
        if why_not is not None:
            pytest.skip(f"{implementation.name} cannot serve this case: {why_not}")
        try:
            work, memory = prepare(implementation, case, *workbench.prepared(case))
        except Exception as error:
            ours = implementation.name.startswith(OURS)
            if ours and not isinstance(error, torch.OutOfMemoryError):
                raise
            pytest.skip(f"{implementation.name}: {type(error).__name__}: {error}")
        numbers = figures(case, run(work, case.device))
        readings = workbench.bench(case.device).readings()
        benchmark.extra_info.update({**memory, **numbers, **readings})
        assert implementation.name != OURS or memory.get("memory_ratio", 1.0) <= _MOST_MEMORY

    return measure
