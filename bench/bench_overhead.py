"""Host cost: a call up to its launch, dispatch, import.

Without a GPU, a stand-in replaces Triton's driver; all code before it is real.
"""

import contextlib

import pytest
import torch
import triton

from fastattn.bench.time import overhead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def device():
    """The GPU, or a CPU whose launches go to the stand-in driver."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not launched")
    with contextlib.nullcontext() if DEVICE == "cuda" else overhead.stand_in_gpu():
        yield DEVICE


@pytest.fixture
def fewest(request):
    """The least rounds of a benchmark: --benchmark-min-rounds, or 5."""
    return request.config.getoption("benchmark_min_rounds")


@pytest.mark.parametrize("row", overhead.ROWS)
def test_host_cost_of_a_call(benchmark, device, fewest, row):
    """pytest-benchmark times the call without gradients; the extra info has all calls."""
    calls = overhead.calls(device, row)
    costs = overhead.host_costs(calls, rounds=4 * fewest)
    over = costs["fastattn"] - costs["bare launch"]
    benchmark.extra_info["us"] = {name: round(us, 2) for name, us in costs.items()}
    benchmark.extra_info["us_over_bare_launch"] = round(over, 2)
    benchmark.pedantic(calls["fastattn"], rounds=10 * fewest, iterations=10, warmup_rounds=2)
    if device == "cuda":
        torch.cuda.synchronize()


def test_import_over_torch_and_triton(benchmark, fewest):
    times = []
    rounds = min(2, fewest)
    benchmark.pedantic(lambda: times.append(overhead.import_ms()), rounds=rounds)
    benchmark.extra_info["import_ms"] = round(min(times), 1)
