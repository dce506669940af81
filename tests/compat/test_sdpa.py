"""`fastattn.compat.sdpa` against torch's own function, over torch's own space of arguments.

Most of what this file tests is translation, for which the formula stands in for the kernels: it is
many times as fast as interpreting them. Calls of these are drawn in test_integrations.py.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_by_oracle, with_gradients
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn import dispatch
from fastattn.compat import diffusers, sdpa, xformers
from fastattn.compat.transformers import attention_forward
from fastattn.testing.calls import Draw
from fastattn.testing.inputs import to_device

torch_attention = F.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("one_thread")

LOWEST = torch.finfo(torch.float32).min


def plain(**kwargs: Any) -> Tensor:
    """torch's own formula: its fused kernel for CPUs has a result for fewer calls."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(**kwargs)


def assert_equals_torch(kwargs: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Output and gradients within the budget, torch's formula in fp64 being the reference."""

    def by(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        def call(*values: Any) -> Tensor:
            return function(**dict(zip(kwargs, values, strict=True)))

        return with_gradients(call, kwargs.values(), dtype)

    ours = by(sdpa.scaled_dot_product_attention, dtype)
    assert all(x.dtype == dtype for x in ours)
    mask = kwargs.get("attn_mask")
    # Of a row of lowest numbers, the log of the denominator tells nothing about the denominator:
    # torch's fused kernels lose its gradients too.
    lowest = mask is not None and mask.dtype != torch.bool and bool((mask == LOWEST).any())
    n = 1 if lowest else len(ours)
    assert_by_oracle(ours[:n], lambda dtype: by(plain, dtype)[:n], dtype)


def drawn(draw: Draw) -> dict[str, Any]:
    """Arguments of any rank, each dim of which may be 1: grouped heads, scales, and masks with
    their own dims, of which leading ones may be missing; a few do not fit.
    """
    dims = draw.integer(2, 6)
    grouped = dims > 2 and draw.chance(0.4)
    L, S, E, E_v = (draw.integer(1, n) for n in (6, 6, 9, 9))
    batch = [draw.integer(1, 3) for _ in range(dims - 3)]
    H = [draw.choice(1, 2, 4)] if dims > 2 else []
    groups = [draw.choice(1, 2, 4)] * len(H)

    def thinned(sizes: list[int]) -> list[int]:
        return [1 if draw.chance(0.25) else size for size in sizes]

    heads = [H, groups, groups] if grouped else [thinned(H) for _ in range(3)]
    sizes = ((L, E), (S, E), (S, E_v))
    kwargs: dict[str, Any] = {
        name: draw.normal(*thinned(batch), *of, *size)
        for name, of, size in zip(("query", "key", "value"), heads, sizes, strict=True)
    }
    kwargs["enable_gqa"] = grouped
    if draw.chance(0.5):
        kwargs["scale"] = draw.choice(0.3, 2, -0.5, 0.0)
    kind = draw.choice("none", "causal", "bool", "float", "holes", "bool", "float", "both")
    kwargs["is_causal"] = kind in ("causal", "both")
    if kind not in ("none", "causal"):
        shape = thinned([*batch, *H, L, S])[draw.integer(0, dims - 2) :]
        if draw.chance(0.1):
            shape[draw.integer(0, len(shape) - 1)] = 7
        mask = draw.normal(*shape)
        kwargs["attn_mask"] = mask > -0.5 if kind == "bool" else mask
        if kind == "holes":
            kwargs["attn_mask"] = mask.where(mask > -0.5, draw.choice(-torch.inf, LOWEST))
    return kwargs


def test_equals_torch_over_its_arguments(served):
    for seed in range(500):
        kwargs = drawn(Draw(f"{seed}/sdpa"))
        served.clear()
        try:
            expected = torch_attention(**kwargs)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                sdpa.scaled_dot_product_attention(**kwargs)
            continue
        o = sdpa.scaled_dot_product_attention(**kwargs)
        both = kwargs["is_causal"] and "attn_mask" in kwargs
        assert bool(served) == (kwargs.get("scale", 1) > 0 and not both), seed
        if served:
            assert_equals_torch(kwargs)
        else:
            assert torch.allclose(o, expected, rtol=0, atol=0, equal_nan=True), seed


def qkv(L: int = 5, S: int = 7, H_k: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, L, 16), "key": (2, H_k, S, 16), "value": (2, H_k, S, 16)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def to_dtype(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) for name, x in inputs.items()}


def lowest_rows(lowest: float) -> Tensor:
    """A bias [5, 7] whose row 2 is `lowest`, and row 1 in part."""
    bias = torch.zeros(5, 7)
    bias[2] = bias[1, 3:] = lowest
    return bias


PAIR_BIAS = {
    **{name: torch.stack([x, -x, 2 * x], 1) for name, x in qkv().items()},
    "attn_mask": torch.linspace(-1, 1, 2 * 4 * 5 * 7).reshape(2, 1, 4, 5, 7),
}


@pytest.mark.parametrize(
    ("leading", "count"),
    [((2, 1), 2), ((1, 3), 2), ((1, 1), 1), ((2, 3), 1), ((3,), 2)],
)
def test_a_bias_that_broadcasts_is_not_copied(served, monkeypatch, leading, count):
    """In as few calls as have no row twice."""
    seen = []
    attend = sdpa.fused_attention.attention

    def attention(*qkv: Tensor, **options: Any) -> Tensor:
        seen.append(options["attn_bias"].untyped_storage().nbytes())
        return attend(*qkv, **options)

    monkeypatch.setattr(sdpa.fused_attention, "attention", attention)
    call = PAIR_BIAS | {"attn_mask": torch.randn(*leading, 4, 5, 7)}
    torch.testing.assert_close(sdpa.scaled_dot_product_attention(**call), plain(**call))
    assert len(seen) == len(served) == count
    assert max(seen) <= call["attn_mask"].untyped_storage().nbytes()
    assert sdpa.explain(**call).backend != "torch"


# Functions of q, k and v with their heads in dim 1 and a bias [T_q, T_k].
BIASED: dict[str, Callable[..., Tensor]] = {
    "sdpa": lambda *qkv, bias: sdpa.scaled_dot_product_attention(*qkv, bias),
    "xformers": lambda *qkv, bias: xformers.memory_efficient_attention(
        *(x.transpose(1, 2) for x in qkv), bias.expand(2, 4, 5, 7)
    ).transpose(1, 2),
    "diffusers": lambda *qkv, bias: diffusers.attend(
        *(x.transpose(1, 2) for x in qkv), bias[None, None]
    ).transpose(1, 2),
    "transformers": lambda *qkv, bias: attention_forward(
        torch.nn.Module(), *qkv, None, is_causal=False, position_bias=bias[None, None]
    )[0].transpose(1, 2),
}


@pytest.mark.parametrize("integration", BIASED)
def test_a_row_of_lowest_numbers_is_the_mean_of_its_values(integration, monkeypatch, device):
    """The budget says nothing here: naive runs in base two take the lowest number for -inf."""
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    q, k, v = to_device(qkv(), device).values()
    bias = lowest_rows(LOWEST).to(device)
    o = BIASED[integration](q, k, v, bias=bias)
    torch.testing.assert_close(o[:, :, 2], v.mean(2))


def test_dropout_drops_with_torchs_seed(served):
    inputs = qkv(64, 64) | {"value": torch.ones(2, 4, 64, 16)}

    def draw() -> Tensor:
        torch.manual_seed(3)
        return sdpa.scaled_dot_product_attention(**inputs, dropout_p=0.5)

    o = draw()
    assert torch.equal(o, draw())
    assert len(served) == 2
    # Each row sums its kept weights, doubled: 1 in expectation, and 1 in none.
    assert 0.9 < o.mean() < 1.1
    assert o.std() > 0.05


def test_vmap_over_the_batch(monkeypatch, device):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    inputs = [x.to(device) for x in qkv().values()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert torch.equal(torch.vmap(attend)(*inputs), attend(*inputs))


def test_compiled_once_for_all_lengths(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    counter = CompileCounter()
    attend = torch.compile(
        sdpa.scaled_dot_product_attention, backend=counter, fullgraph=True, dynamic=True
    )
    for length in (5, 6, 9, 17):
        inputs, mask = qkv(length, length), torch.ones(length, length, dtype=torch.bool).tril()
        o = attend(**inputs, attn_mask=mask)
        by_torch = partial(torch_attention, attn_mask=mask)
        assert_by_oracle([o], lambda x: [by_torch(**to_dtype(inputs, x))])  # noqa: B023
    assert counter.frame_count == 1


# What torch refuses. Every entry replaces arguments of qkv().
REFUSED: dict[str, dict[str, Any]] = {
    "list": {"query": [1.0]},
    "one-dim": {n: x[0, 0, 0] for n, x in qkv().items()},
    "dtypes": {"key": qkv()["key"].double()},
    "heads": {"key": qkv(H_k=2)["key"], "value": qkv(H_k=2)["value"]},
    "heads-not-divisible": {**qkv(H_k=3), "enable_gqa": True},
    "width": {"key": qkv()["key"][..., :8]},
    "int-mask": {"attn_mask": torch.ones(5, 7, dtype=torch.int32)},
    "double-mask": {"attn_mask": torch.ones(5, 7).double()},
    "mask-shape": {"attn_mask": torch.ones(5, 6)},
    "mask-one-dim": {"attn_mask": torch.ones(7)},
    "mask-more-dims": {"attn_mask": torch.ones(1, 2, 4, 5, 7)},
    "mask-larger-batch": {
        **{n: x[:1] for n, x in qkv().items()},
        "attn_mask": torch.ones(2, 1, 5, 7),
    },
    "dropout": {"dropout_p": 2.0},
    "is-causal": {"is_causal": 1},
    "grouped-without-heads": {**{n: x[0, 0] for n, x in qkv().items()}, "enable_gqa": True},
    "unknown": {"window": 3},
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(served, name):
    errors = []
    for attend in (torch_attention, sdpa.scaled_dot_product_attention):
        with pytest.raises((TypeError, RuntimeError, IndexError)) as raised:
            attend(**{**qkv(), **REFUSED[name]})
        errors.append(raised.type)
    assert errors[0] is errors[1]
    assert served == []


TORCH_SERVES = {
    "all-dropped": {"dropout_p": 1.0},
    "float64": {n: x.double() for n, x in qkv().items()},
    "negative-scale": {"scale": -0.5},
    "zero-scale": {"scale": 0.0},
    "mask-and-causal": {"attn_mask": torch.zeros(5, 7), "is_causal": True},
    "no-queries": {"query": torch.empty(2, 4, 0, 16)},
    "mixed-dims": {"key": qkv()["key"][0], "value": qkv()["value"][0]},
    "uneven-groups": {"key": qkv(H_k=2)["key"], "value": qkv()["value"], "enable_gqa": True},
}


def result(attend: Callable[..., Tensor], arguments: dict[str, Any]) -> Any:
    """The result, or the error."""
    try:
        return attend(**arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", TORCH_SERVES)
def test_the_rest_is_torchs_bit_for_bit(served, name):
    arguments = {**qkv(), **TORCH_SERVES[name]}
    ours, expected = (
        result(attend, arguments) for attend in (sdpa.scaled_dot_product_attention, torch_attention)
    )
    # On a CPU a mask beside is_causal is refused from torch 2.15 on.
    refused = isinstance(expected, str) and name == "mask-and-causal"
    assert ours == expected if refused else torch.equal(ours, expected)
    assert served == []
    assert sdpa.explain(**arguments).reasons["triton"]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_torchs(served):
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    assert sdpa.scaled_dot_product_attention(x, x, x).is_nested
    assert served == []


def test_environment_leaves_all_to_torch(served, monkeypatch):
    with torch.device("cpu"):  # a default device is no override
        sdpa.scaled_dot_product_attention(**qkv())
    assert len(served) == 1
    monkeypatch.setenv(dispatch.ENVIRONMENT, "torch")
    sdpa.scaled_dot_product_attention(**qkv())
    assert len(served) == 1
    assert "FASTATTN_BACKEND" in sdpa.explain(**qkv()).reasons["triton"]
