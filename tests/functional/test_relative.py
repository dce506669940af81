"""Relative biases, keys and queries on the kernels: against the oracle, and how they compile."""

import itertools
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from nightly import gate_cases

import fastattn
from fastattn import reference
from fastattn.kernels.backward import launch_backward
from fastattn.kernels.backward_relative import launch_backward_relative
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
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


def query(B: int, H_q: int, *_: int) -> dict[str, torch.Tensor]:
    return {"relative_query": draw(B, H_q, T_q, D, seed=9)}


HOLES = draw(2, T_k, seed=3) > 0
OFFSETS = torch.tensor([70, -50])

# With the tiles of the interpreter, 32 x 32, every call meets several tiles in each direction.
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "bias": (HEADS, bias(100, 4)),
    "bias-clamped": (ROWS, bias(5)),
    "bias-reach-0": (ONE, {**bias(0), "causal": True}),
    "keys": (ROWS, keys(100)),
    "keys-of-kv-heads": (HEADS, {**keys(11, 2), "causal": True}),
    "keys-of-query-heads": (HEADS, {**keys(11, 4), "window": (20, 3)}),
    "query": (HEADS, {**keys(6, 2), **query(*HEADS), "causal": True}),
    "all": (ONE, {**bias(9), **keys(21), **query(*ONE), "softcap": 2.0}),
    "past-both-ends": (ROWS, {**bias(8), **keys(8), "query_offset": OFFSETS}),
    "padding": (ROWS, {**bias(8), **keys(8), "key_padding_mask": HOLES}),
    "lengths": (ROWS, {**keys(8), "key_lengths": torch.tensor([21, 0]), "causal": True}),
    "documents": (
        ONE,
        {
            **bias(30),
            **keys(3),
            "documents": (draw(1, T_q).round().long(), draw(1, T_k).round().long()),
        },
    ),
    "mask": (ONE, {**bias(4), **keys(30), "attn_mask": draw(2, T_q, T_k) > 0}),
    "stride-and-first": (ONE, {**keys(8), "causal": True, "stride": 3, "keep_first": 2}),
    "prefix": (ROWS, {**bias(8), "causal": True, "prefix_lengths": torch.tensor([40, 3])}),
    "dropout": (ROWS, {**bias(8), **keys(8), "dropout": 0.4, "dropout_seed": OFFSETS}),
    "attn-bias": (ONE, {**keys(8), "attn_bias": draw(1, T_q, 1)}),
    "alibi-sinks": (ONE, {**keys(8), "alibi_slopes": draw(2).abs(), "sinks": draw(2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_the_oracle(case: str, device: str) -> None:
    sizes, arguments = CASES[case]
    q, k, v = make_qkv(*sizes, T_q, T_k, D, device=device)
    assert_matches_reference(attention, q, k, v, **to_device(arguments, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv(*ONE, T_q, T_k, D, dtype=dtype, device=device)
    arguments = to_device({**keys(8), **query(*ONE)}, device)
    arguments = {name: x.to(dtype) for name, x in arguments.items()}
    arguments |= to_device(bias(8), device)
    assert_matches_reference(attention, q, k, v, causal=True, **arguments)


@pytest.mark.parametrize("sizes", [(40, 8), (8, 24)], ids=str)
def test_head_dims_that_are_no_power_of_two(sizes: tuple[int, int], device: str) -> None:
    """And more queries than keys."""
    q, k, v = make_qkv(*ONE, 80, 20, sizes[0], sizes[1], device=device)
    assert_matches_reference(attention, q, k, v, **to_device(keys(5, D=sizes[0]), device))


@pytest.mark.parametrize("tile", [(16, 64), (64, 16)], ids=str)
def test_tiles_that_are_not_square(tile: tuple[int, int], device: str) -> None:
    q, k, v = make_qkv(*ONE, 70, 70, D, device=device)
    arguments = {"relative_keys": draw(1, 41, D), "relative_bias": draw(2, 5), "causal": True}
    with tiles.forced(relative=TileConfig(*tile)):
        assert_matches_reference(attention, q, k, v, **to_device(arguments, device))


def test_packed_sequences(device: str) -> None:
    """One of them without queries, one without keys, and of different lengths."""
    q, k, v = (x[0].transpose(0, 1).detach() for x in make_qkv(*ONE, 60, 75, D))
    offsets = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 38, 38, 45, 60], [0, 40, 45, 45, 75])
    )
    own_query = draw(60, 2, D, seed=9)
    arguments = to_device(
        {**bias(6), **keys(20), "relative_query": own_query, "window": (25, 4)}, device
    )
    assert_matches_reference(
        partial(fastattn.attention_varlen, backend="triton"),
        *(x.to(device).requires_grad_() for x in (q, k, v)),
        *(x.to(device) for x in offsets),
        oracle=reference.attention_varlen,
        **arguments,
    )


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)], ids=str)
def test_no_queries_or_no_keys(sizes: tuple[int, int], device: str) -> None:
    q, k, v = make_qkv(*ROWS, *sizes, D, device=device)
    assert_matches_reference(attention, q, k, v, **to_device({**bias(3), **keys(3)}, device))


def test_nan_in_padded_keys_reaches_nothing(device: str) -> None:
    q, k, v = clean = make_qkv(*ROWS, T_q, T_k, D, device=device)
    arguments = to_device({**bias(8), **keys(8), "key_padding_mask": HOLES}, device)
    gone = ~arguments["key_padding_mask"][:, None, :, None]
    k, v = (x.detach().masked_fill(gone, float("nan")).requires_grad_() for x in (k, v))
    assert_matches_reference(attention, q, k, v, clean=clean, **arguments)


def test_gradients_are_the_same_bits_each_time(device: str) -> None:
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    arguments = to_device({**bias(8), **keys(8)}, device)
    first, second = (results(attention, q, k, v, **arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


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
SPILL_BYTES = {
    ("sm_80", "forward", 128, "float32"): 4,
    ("sm_80", "backward", 128, "float32"): 4,
}
# target, kernel, head dim, dtype
COMPILED = gate_cases(
    [
        *itertools.product(("sm_90",), KERNELS, (128,), ("bfloat16",)),
    ],
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
