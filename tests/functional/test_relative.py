"""Relative biases, keys and queries on the kernels: against the oracle, and how they compile."""

import itertools
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from nightly import gate_cases

import fastattn
from fastattn.kernels.backward import launch_backward
from fastattn.kernels.backward_relative import launch_backward_relative
from fastattn.kernels.forward import launch_forward
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.compare import results
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import USUAL_SPILL_BYTES, CompiledFacts
from fastattn.testing.inputs import draw, to_device

attention = partial(fastattn.attention, backend="triton")

T_q, T_k, D = 37, 45, 16
# B, H_q, H_k.
ONE, ROWS, HEADS = (1, 2, 1), (2, 2, 1), (1, 4, 2)


def bias(reach: int, heads: int = 2) -> dict[str, torch.Tensor]:
    return {"relative_bias": draw(heads, 2 * reach + 1)}


def keys(reach: int, heads: int = 1, D: int = D) -> dict[str, torch.Tensor]:
    return {"relative_keys": draw(heads, 2 * reach + 1, D, seed=8)}


OFFSETS = torch.tensor([70, -50])


def test_unaligned_vectors_are_copied(device: str) -> None:
    """A view that does not start at a multiple of 16 bytes."""
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    vectors = draw(1, 17, D).to(device)
    shifted = torch.cat((vectors.new_zeros(1), vectors.flatten()))[1:].view_as(vectors)
    assert shifted.data_ptr() % 16
    o = attention(q, k, v, relative_keys=shifted)
    assert torch.equal(o, attention(q, k, v, relative_keys=vectors))


def test_window_on_both_sides_needs_no_offset_on_the_host(monkeypatch, device: str) -> None:
    """Reading a tensor of offsets would wait for the GPU."""
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    arguments = to_device({**bias(3), "query_offset": OFFSETS // 8}, device)
    assert_matches_reference(attention, q, k, v, window=(4, 2), **arguments)
    monkeypatch.setattr(torch, "aminmax", None)
    results(attention, q, k, v, window=(4, 2), **arguments)
    with pytest.raises(TypeError):
        results(attention, q, k, v, **arguments)


def launch(kernel: str, D: int, dtype: str) -> None:
    """Launch one kernel on meta tensors, with every tensor for distances that there is."""

    def meta(*shape: int, dtype: str = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta")

    q, k, v = meta(2, 4, 1000, D), meta(2, 2, 1000, D), meta(2, 2, 1000, D)
    lse = meta(2, 4, 1000, dtype="float32")
    options = Options(
        right=0,
        scale=0.1,
        relative_bias=meta(4, 513),
        relative_keys=meta(1, 513, D),
        relative_query=meta(2, 4, 1000, D),
    )
    if kernel == "forward":
        launch_forward(q, k, v, options)
    elif kernel == "backward":
        launch_backward(q, None, q, k, v, q, lse, options)
    else:
        launch_backward_relative(q, q, k, v, lse, lse, options)


KERNELS = {"forward": 1, "backward": 2, "backward_relative": 1}
# fp32 rows of 128 columns have no matrix units: the smallest spills that were found.
SPILL_BYTES = {("sm_80", "forward", 128, "float32"): 4, ("sm_80", "backward", 128, "float32"): 4}
# target, kernel, head dim, dtype
COMPILED = gate_cases(
    [*itertools.product(("sm_90",), KERNELS, (128,), ("bfloat16",))],
    [
        *itertools.product(("sm_80",), KERNELS, (128,), ("float32",)),
        *itertools.product(("sm_90",), KERNELS, (64, 256), ("bfloat16",)),
        *itertools.product(("sm_80", "gfx942"), KERNELS, (128,), ("bfloat16",)),
        *itertools.product(("sm_100",), KERNELS, (64,), ("bfloat16",)),
    ],
)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple, Future]:
    """All at once, so that every worker has something to do."""
    return {
        case: compile_pool.submit(
            f"{__file__}:launch", case[0], kernel=case[1], D=case[2], dtype=case[3]
        )
        for case in COMPILED
    }


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(map(str, case)))
def test_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    facts: list[CompiledFacts] = compiled[case].result()
    facts = [f for f in facts if f.name.startswith("attention_")]
    assert len(facts) == KERNELS[case[1]]
    for fact in facts:
        allowed = SPILL_BYTES.get(case, USUAL_SPILL_BYTES)
        assert fact.spill_store_bytes <= allowed, f"{fact.name}: {fact.spill_store_bytes} bytes"
        assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"
        assert fact.warnings == ()


def test_a_shift_is_a_load_an_element(compiled: dict[tuple, Future]) -> None:
    """Products by distance reach their keys through shared memory, not by shuffles and selects."""
    facts = compiled["sm_90", "backward", 128, "bfloat16"].result()
    (fact,) = (f for f in facts if f.name == "attention_backward_dq_kernel")
    assert fact.loops
    assert all(loop.count("SHFL") == 0 for loop in fact.loops)
