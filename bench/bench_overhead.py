"""Host cost: a call up to its launch, dispatch, import, the first call.

Without a GPU, launches go to a stand-in for Triton's driver; everything before it is real.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastattn import attention
from fastattn.bench.time import overhead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def device():
    """The GPU, or a CPU whose launches go to the stand-in driver."""
    import triton

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not launched")
    stand_in = contextlib.nullcontext() if DEVICE == "cuda" else overhead.stand_in_gpu()
    with stand_in:
        yield DEVICE


@pytest.fixture
def fewest(request):
    """The least rounds of a benchmark: 5, or what --benchmark-min-rounds says."""
    return request.config.getoption("benchmark_min_rounds")


@pytest.mark.parametrize("row", overhead.ROWS)
def test_host_cost_of_a_call(benchmark, device, fewest, row):
    """pytest-benchmark has the call without gradients; the extra info all of them."""
    calls = overhead.calls(device, row)
    costs = overhead.host_costs(calls, rounds=4 * fewest)
    bare = costs["bare launch"]
    benchmark.extra_info["us"] = {name: round(us, 2) for name, us in costs.items()}
    benchmark.extra_info["us_over_bare_launch"] = round(costs["fastattn"] - bare, 2)
    benchmark.pedantic(calls["fastattn"], rounds=10 * fewest, iterations=10, warmup_rounds=2)
    if device == "cuda":
        torch.cuda.synchronize()


SMALL = {
    "fastattn-torch": partial(attention, causal=True, backend="torch"),
    "sdpa": partial(F.scaled_dot_product_attention, is_causal=True),
}


@pytest.mark.parametrize("implementation", SMALL)
def test_dispatch_on_the_cpu(benchmark, implementation):
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    call = SMALL[implementation]
    benchmark.pedantic(lambda: call(q, k, v), rounds=50, iterations=20, warmup_rounds=2)


def test_import_over_torch_and_triton(benchmark, fewest):
    times = []
    rounds = min(2, fewest)
    benchmark.pedantic(lambda: times.append(overhead.import_ms(repeats=1)), rounds=rounds)
    benchmark.extra_info["import_ms"] = round(min(times), 1)


def test_first_call(benchmark):
    """Compiles in a fresh process with an empty Triton cache, then loads in another."""
    found = {}
    benchmark.pedantic(lambda: found.update(overhead.first_call_ms(DEVICE)), rounds=1)
    benchmark.extra_info.update({name: round(ms, 1) for name, ms in found.items()})
