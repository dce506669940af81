"""Fixtures of the benchmarks: the cases for this machine, and how each is run.

A file of this folder names a family of cases; each of its tests is one implementation on one case.
The kernels run as they do for users: compiled on a GPU, not at all without one.
"""

import math
import sys
import time
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


_MOST_ROUNDS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    from fastattn.bench.cases import SETS

    parser.addoption("--case-set", choices=SETS, default="quick", help="on a GPU (quick)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of (case, implementation) runs for every pair of its module's FAMILY."""
    if not {"case", "implementation"} <= set(metafunc.fixturenames):
        return
    from fastattn.bench.cases import cpu_cases, gpu_cases
    from fastattn.bench.implementations.registry import side_by_side

    which = metafunc.config.getoption("--case-set")
    on_cpu = [] if which == "minute" and torch.cuda.is_available() else cpu_cases()
    cases = [*gpu_cases(which), *on_cpu]
    pairs = [
        pytest.param(
            case,
            implementation,
            id=f"{case.name}-{implementation.name}",
            marks=pytest.mark.gpu if case.device == "cuda" else (),
        )
        for case in cases
        if case.family == metafunc.module.FAMILY
        for implementation in side_by_side(case.device)
    ]
    metafunc.parametrize(("case", "implementation"), pairs)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The minute set has attention calls only."""
    if config.getoption("--case-set") != "minute":
        return
    cases = [item for item in items if "case" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in cases])
    items[:] = cases


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Print the expected duration."""
    from fastattn.bench.terminal import estimate

    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    return estimate(len(on_gpu)) if on_gpu and torch.cuda.is_available() else ""


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


_ROWS = pytest.StashKey[list[Any]]()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print times on the device, by case."""
    from fastattn.bench.terminal import table

    for line in table(config.stash.get(_ROWS, [])):
        terminalreporter.write_line(line)


class _Workbench:
    """Shared state of a session: timers, and the inputs of the current case."""

    def __init__(self) -> None:
        self._case: Any = None
        self._prepared: Any = None
        self._benches: dict[str, Any] = {}

    def bench(self, device: str) -> Any:
        from fastattn.bench.attention import Bench
        from fastattn.bench.measure import Effort, HostTimer
        from fastattn.bench.run.suite import gpu_bench

        if device not in self._benches:
            effort = Effort(target_ms=40, least=3, most=20, pause=0)
            host = Bench(HostTimer(), effort)
            self._benches[device] = gpu_bench("quick") if device == "cuda" else host
        return self._benches[device]

    def prepared(self, case: Any) -> Any:
        """Inputs and expected results of a case; those of the last case are dropped."""
        from fastattn.bench.attention import release
        from fastattn.bench.correctness import expect
        from fastattn.bench.inputs import make_inputs

        if case != self._case:
            self._case = self._prepared = None
            release(case.device)
            inputs = make_inputs(case)
            self._case, self._prepared = case, (inputs, expect(case, inputs))
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
def rounds(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], int]:
    """How often to call a function: by pytest-benchmark's options, and 20 times at most."""
    seconds = float(request.config.getoption("benchmark_max_time"))
    fewest = request.config.getoption("benchmark_min_rounds")

    def count(function: Callable[[], object]) -> int:
        begin = time.perf_counter()
        function()
        taken = time.perf_counter() - begin
        return max(fewest, min(_MOST_ROUNDS, math.ceil(seconds / taken)))

    return count


@pytest.fixture
def effort(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """An effort within pytest-benchmark's options."""
    ms = 1e3 * float(request.config.getoption("benchmark_max_time"))
    fewest = request.config.getoption("benchmark_min_rounds")
    return lambda usual: replace(
        usual, target_ms=min(usual.target_ms, ms), least=min(usual.least, fewest)
    )


@pytest.fixture
def run(
    benchmark: Any,
    workbench: _Workbench,
    quiet_peers: None,
    rounds: Callable[..., int],
    effort: Callable[[Any], Any],
) -> Callable[[Any, str], None]:
    """Benchmarks a function on "cuda" or "cpu"; device times go into extra_info."""

    def measure(function: Callable[[], object], device: str) -> None:
        bench = workbench.bench(device)
        if device != "cuda":
            benchmark.pedantic(function, rounds=rounds(function), warmup_rounds=1)
            return
        from fastattn.bench.measure import compare

        timing = compare({"it": function}, bench.timer, effort(bench.effort))["it"]
        if isinstance(timing, Exception):
            raise timing
        benchmark.extra_info["device_ms"] = timing.to_dict()

        def call() -> None:
            function()
            torch.cuda.synchronize()

        benchmark.pedantic(call, setup=bench.timer.flush, rounds=timing.samples)

    return measure


@pytest.fixture
def run_attention(
    benchmark: Any,
    run: Callable[[Any, str], None],
    workbench: _Workbench,
    request: pytest.FixtureRequest,
) -> Callable[[Any, Any], None]:
    """Checks one implementation on one case, benchmarks it, and notes its figures.

    Skips an implementation that cannot serve the case, with the reason, and a peer that fails or
    gives wrong results.
    """
    from fastattn.bench import attention, figures
    from fastattn.bench.terminal import Row

    def measure(case: Any, implementation: Any) -> None:
        benchmark.group = case.name
        why_not = implementation.why_not(case)
        if why_not is not None:
            pytest.skip(f"{implementation.name} cannot serve this case: {why_not}")
        try:
            inputs, expected = workbench.prepared(case)
            work, memory = attention.prepare(implementation, case, inputs, expected)
        except Exception as error:
            if implementation.name.startswith("fastattn") and not _is_memory(error):
                raise
            pytest.skip(f"{implementation.name}: {type(error).__name__}: {error}")
        run(work, case.device)
        info = benchmark.extra_info
        info.update(memory)
        if "device_ms" in info:
            ms = info["device_ms"]["median"]
            found = figures.figures(case, ms)
            info.update(found)
            info.update(workbench.bench(case.device).readings())
            key, unit = ("kv_gbps", "GB/s") if "kv_gbps" in found else ("tflops", "TFLOP/s")
            row = Row(case.name, implementation.name, ms, found[key], unit)
            request.config.stash.setdefault(_ROWS, []).append(row)
        elif implementation.name == "fastattn-torch":
            info["time_over_sdpa"] = _time_over_sdpa(case, work, workbench)

    return measure


def _time_over_sdpa(case: Any, work: Callable[[], object], workbench: _Workbench) -> float:
    """Time of `work` over the time of torch's SDPA, called directly, in alternation."""
    from fastattn.bench import attention
    from fastattn.bench.implementations.registry import IMPLEMENTATIONS
    from fastattn.bench.measure import compare

    sdpa = next(i for i in IMPLEMENTATIONS if i.name == "sdpa")
    theirs, _ = attention.prepare(sdpa, case, *workbench.prepared(case))
    bench = workbench.bench("cpu")
    found = compare({"ours": work, "theirs": theirs}, bench.timer, bench.effort)
    return round(found["ours"].median / found["theirs"].median, 3)


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError)
