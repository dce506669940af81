"""Host cost: a call up to its launch, dispatch, import.

Without a GPU, a stand-in replaces Triton's driver; all code before it is real.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from fastattn import attention, patch_sdpa, swap
from fastattn.bench.time import overhead
from fastattn.compat import torch_flash

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


class _Calling(nn.Module):
    """Attention by torch's function, looked up at each call unless given."""

    def __init__(self, function=None):
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.function or F.scaled_dot_product_attention)(q, k, v)


class _Eager(nn.Module):
    """Attention by product, softmax, product."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_host_cost_of_doors(benchmark, device, fewest):
    """Each way to serve a call of torch or of a module, in one run.

    Without a GPU, torch's own function and the plain modules compute on the CPU.
    """
    tensors = [torch.randn(1, 2, 64, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    own, flash = F.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_flash_attention
    swapped, captured = _Calling(), _Eager()
    swaps = [swap(swapped), swap(captured, eager=True)]
    torch_flash.register("CUDA" if device == "cuda" else "CPU")
    activate_flash_attention_impl("fastattn")
    calls = {
        "torch's function": own,
        "a module that calls it": _Calling(own),
        "a module of products and softmax": _Eager(),
        "attention": attention,
        "torch's function, patched": lambda *x: F.scaled_dot_product_attention(*x),
        "torch's flash operator, registered": flash,
        "a module, swapped": swapped,
        "a module, captured": captured,
    }
    functions = {name: partial(call, *tensors) for name, call in calls.items()}
    try:
        with torch.no_grad(), patch_sdpa():
            costs = overhead.host_costs(functions, rounds=4 * fewest)
            benchmark.pedantic(partial(swapped, *tensors), rounds=10 * fewest, iterations=10)
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        counts = [done.calls[""] for done in swaps]
        for done in swaps:
            done.undo()
    # Every call was served as intended.
    assert all(calls.served > 0 == calls.passed for calls in counts), counts
    benchmark.extra_info["us"] = {name: round(us, 2) for name, us in costs.items()}
    ours = costs["attention"]
    benchmark.extra_info["over_attention"] = {n: round(us / ours, 2) for n, us in costs.items()}


def test_import_over_torch_and_triton(benchmark, fewest):
    times = []
    rounds = min(2, fewest)
    benchmark.pedantic(lambda: times.append(overhead.import_ms()), rounds=rounds)
    benchmark.extra_info["import_ms"] = round(min(times), 1)
