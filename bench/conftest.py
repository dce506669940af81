"""Fixtures of the benchmarks: the cases for this machine, and how each is run.

What is timed is timed by the loop of the harness, and pytest-benchmark shows its samples. The
kernels run as they do for users: compiled on a GPU, not at all without one.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, which is the name of somebody else's distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

# Seconds of a benchmark on a GPU: check against the oracle, samples, sometimes a compilation.
_SECONDS_EACH = 1.0
_MOST_MEMORY = 1.05  # of the least


def pytest_addoption(parser: pytest.Parser) -> None:
    from fastattn.bench.cases.case import SETS

    parser.addoption("--case-set", choices=SETS, default="quick", help="on a GPU (quick)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of (case, implementation) runs for every pair."""
    if not {"case", "implementation"} <= set(metafunc.fixturenames):
        return
    from fastattn.bench.cases.case import cpu_cases, gpu_cases
    from fastattn.bench.cases.registry import side_by_side

    which = metafunc.config.getoption("--case-set")
    on_cpu = [] if which == "minute" and torch.cuda.is_available() else cpu_cases()
    pairs = [
        pytest.param(
            case,
            implementation,
            id=f"{case.name}-{implementation.name}",
            marks=pytest.mark.gpu if case.device == "cuda" else (),
        )
        for case in [*gpu_cases(which), *on_cpu]
        for implementation in side_by_side(case.device)
    ]
    metafunc.parametrize(("case", "implementation"), pairs)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Replay what the harness times; the minute set has attention calls only."""
    for item in items:
        if "run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=_Samples.clock))
    if config.getoption("--case-set") == "minute":
        cases = [item for item in items if "case" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in cases])
        items[:] = cases


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Print the expected duration."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu or not torch.cuda.is_available():
        return ""
    minutes = max(1, round(len(on_gpu) * _SECONDS_EACH / 60))
    return (
        f"{len(on_gpu)} benchmarks on the GPU: about {minutes} min, and longer where "
        "a peer compiles first (--case-set minute has the least)"
    )


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End the session if the CUDA context is lost, where every later call would fail."""
    if item.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        pytest.exit(
            f"{item.name} has broken the CUDA context, in which nothing more can be measured: "
            f"{type(error).__name__}: {error}. Leave it out with --deselect.",
            returncode=3,
        )


class _Samples:
    """Samples that were timed before, for a benchmark whose clock is `clock`: a call takes one."""

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
        self._benches: dict[str, Any] = {}

    def bench(self, device: str) -> Any:
        from fastattn.bench.time.samples import Bench, Effort, HostTimer
        from fastattn.bench.time.suite import gpu_bench

        if device not in self._benches:
            host = Bench(HostTimer(), Effort(target_ms=1000, least=5, most=20, pause=0))
            self._benches[device] = gpu_bench("quick") if device == "cuda" else host
        return self._benches[device]

    def prepared(self, case: Any) -> Any:
        """Inputs and expected results of a case; those of the last case are dropped."""
        from fastattn.bench.cases.inputs import make_inputs
        from fastattn.bench.time.attention import release

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
    """Warnings are errors in this suite, but not those of other people's code."""
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
        from fastattn.bench.time.samples import Timing

        bench = workbench.bench(device)
        effort = bench.effort
        effort = replace(
            effort, target_ms=min(effort.target_ms, longest), least=min(effort.least, fewest)
        )
        samples = replace(bench, effort=effort).samples({"it": function})["it"]
        if isinstance(samples, Exception):
            raise samples
        timing = Timing.of(samples)
        benchmark.extra_info["ms"] = timing.to_dict()
        benchmark.pedantic(_Samples(samples), rounds=len(samples))
        return timing.median

    return measure


@pytest.fixture
def run_attention(
    benchmark: Any, run: Callable[[Any, str], float], workbench: _Workbench
) -> Callable[[Any, Any], None]:
    """Checks one implementation on one case, benchmarks it, and notes its figures.

    Skips an implementation that cannot serve the case, with the reason, and a peer that fails or
    gives wrong results.
    """
    from fastattn.bench.cases.figures import figures
    from fastattn.bench.cases.registry import OURS
    from fastattn.bench.time.attention import prepare

    def measure(case: Any, implementation: Any) -> None:
        benchmark.group = case.name
        why_not = implementation.why_not(case)
        if why_not is not None:
            pytest.skip(f"{implementation.name} cannot serve this case: {why_not}")
        try:
            work, memory = prepare(implementation, case, *workbench.prepared(case))
        except Exception as error:
            ours = implementation.name.startswith("fastattn")
            if ours and not isinstance(error, torch.OutOfMemoryError):
                raise
            pytest.skip(f"{implementation.name}: {type(error).__name__}: {error}")
        found = figures(case, run(work, case.device))
        readings = workbench.bench(case.device).readings()
        benchmark.extra_info.update({**memory, **found, **readings})
        assert implementation.name != OURS or memory.get("memory_ratio", 1.0) <= _MOST_MEMORY

    return measure
