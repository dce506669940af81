"""Peak memory of a call, over the least: inputs, outputs and lse."""

import gc

import pytest
import torch

from fastattn.bench import attention, cases, correctness, inputs
from fastattn.bench.implementations.registry import side_by_side

CASES = [
    cases.sweep("forward", 128, 4096, causal=True),
    cases.sweep("forward_backward", 128, 4096, causal=True),
    cases.grouped("forward_backward", 8192, causal=True),
]
PAIRS = [
    pytest.param(case, implementation, id=f"{case.name}-{implementation.name}")
    for case in CASES
    for implementation in side_by_side("cuda")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "attends"), PAIRS)
def test_memory(benchmark, quiet_peers, shape, attends):
    why_not = attends.why_not(shape)
    if why_not is not None:
        pytest.skip(f"{attends.name} cannot serve this case: {why_not}")
    gc.collect()
    torch.cuda.empty_cache()
    tensors = inputs.make_inputs(shape)
    expected = correctness.expect(shape, tensors)
    try:
        work, memory = attention.prepare(attends, shape, tensors, expected)
    except Exception as error:
        if attends.name == "fastattn-triton":
            raise
        pytest.skip(f"{attends.name}: {type(error).__name__}: {error}")
    benchmark.extra_info.update(memory)
    benchmark.pedantic(work, rounds=3)
    if attends.name == "fastattn-triton":
        assert memory["memory_ratio"] <= 1.05
