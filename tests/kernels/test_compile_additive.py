"""Kernels of additive attention and of statistics compile for every GPU, without spills."""

import itertools
from concurrent.futures import Future

import pytest
import torch
from nightly import gate_cases

from fastattn.kernels.additive import (
    additive_backward_da_kernel,
    additive_backward_dbv_kernel,
    additive_forward_kernel,
    launch_additive_backward,
    launch_additive_forward,
)
from fastattn.kernels.launch.key_extents import padding_extents_kernel
from fastattn.kernels.statistics import (
    attention_received_kernel,
    attention_row_statistics_kernel,
    attention_weights_kernel,
    launch_received,
    launch_row_statistics,
    launch_weights,
)
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import count_compilations

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADDITIVE = {
    "additive_forward_kernel",
    "additive_backward_da_kernel",
    "additive_backward_dbv_kernel",
}
STATISTICS = {
    "attention_row_statistics_kernel",
    "attention_received_kernel",
    "attention_weights_kernel",
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def options_for(B: int, T: int, masks: str) -> Options:
    """With all masks that cost registers in the loop over boundary blocks, or the causal one."""
    if masks == "causal":
        return Options(right=0, query_offset=0, scale=0.1)
    per_row = meta(B, dtype=torch.int32)
    padding = meta(B, T, dtype=torch.bool)
    return Options(padding, per_row, per_row, left=9, right=9, query_offset=0, scale=0.1)


def launch_additive(
    D: int,
    dtype: str = "bf16",
    masks: str = "all",
    T: int = 1000,
    B: int = 2,
    H_k: int = 2,
    H_q: int = 4,
) -> None:
    """Forward and backward on meta tensors, hidden and value widths D."""
    q, k = meta(B, H_q, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    u, lse = meta(H_q, D), meta(B, H_q, T)
    options = options_for(B, T, masks)
    launch_additive_forward(q, k, k, u, options)
    launch_additive_backward(q, lse, q, k, k, u, q, lse, options)


def launch_statistics(
    D: int,
    dtype: str = "bf16",
    masks: str = "all",
    top: int = 8,
    T: int = 1000,
    B: int = 2,
    H_k: int = 2,
    H_q: int = 4,
) -> None:
    """Every kernel of statistics on meta tensors."""
    q, k = meta(B, H_q, T, D, dtype=DTYPES[dtype]), meta(B, H_k, T, D, dtype=DTYPES[dtype])
    lse = meta(B, H_q, T)
    options = options_for(B, T, masks)
    launch_row_statistics(q, k, lse, options, top)
    launch_received(q, k, lse, options)
    launch_weights(q, k, lse, options)


def compilations_for_new_shapes() -> list[int]:
    """How many kernels each launch compiled: a first one, then other lengths, batches and heads.

    Cases below have the first ones too, so that the disk cache holds them; the process forgets.
    """
    for kernel in (
        additive_forward_kernel,
        additive_backward_da_kernel,
        additive_backward_dbv_kernel,
        attention_row_statistics_kernel,
        attention_received_kernel,
        attention_weights_kernel,
        padding_extents_kernel,
    ):
        kernel.device_caches.clear()
    shapes = [{}, {"T": 1}, {"T": 4096}, {"B": 1}, {"B": 16}, {"H_k": 1}, {"H_q": 16}]

    def both(**shape: int) -> None:
        launch_additive(128, **shape)
        launch_statistics(128, **shape)

    counts = [count_compilations(lambda shape=shape: both(**shape)) for shape in shapes]
    # Of tops, only the power of two above compiles.
    return [*counts, count_compilations(lambda: launch_statistics(128, top=7))]


BOTH = ("launch_additive", "launch_statistics")
# target, function, width, dtype
CASES = gate_cases(
    [
        *itertools.product(("sm_80",), BOTH, (128,), ("bf16",)),
        ("sm_90", "launch_additive", 64, "fp32"),
    ],
    [
        *itertools.product(("gfx942",), BOTH, (128,), ("bf16",)),
        ("sm_90", "launch_statistics", 64, "fp32"),
        *itertools.product(("sm_90", "sm_100"), BOTH, (128,), ("bf16",)),
        ("sm_90", "launch_additive", 256, "bf16"),
    ],
)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple, Future]:
    """All cases, submitted at once so that every worker has something to do."""
    return {
        case: compile_pool.submit(f"{__file__}:{case[1]}", case[0], D=case[2], dtype=case[3])
        for case in CASES
    }


# Of statistics that share the tiles of dQ.
SPILL_BYTES = {
    ("gfx942", "launch_statistics", 128, "bf16"): 1292,
    ("sm_90", "launch_statistics", 64, "fp32"): 8,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_without_spills(case: tuple, compiled: dict[tuple, Future]) -> None:
    wanted = ADDITIVE if case[1] == "launch_additive" else STATISTICS
    facts = [fact for fact in compiled[case].result() if fact.name in wanted]
    assert {fact.name for fact in facts} == wanted
    for fact in facts:
        allowed = SPILL_BYTES.get(case, 0)
        assert fact.spill_store_bytes <= allowed, f"{fact.name}: {fact.spill_store_bytes} bytes"
        assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes"
        assert fact.warnings == ()


def test_a_new_length_batch_or_head_count_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_shapes", "sm_80")
    assert counts == [7, 0, 0, 0, 0, 0, 0, 0]
