"""Calls that `sdpa.scaled_dot_product_attention` leaves to torch: errors, unserved options."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn import dispatch
from fastattn.compat import sdpa
from fastattn.testing.inputs import draw

torch_attention = F.scaled_dot_product_attention


pytestmark = pytest.mark.usefixtures("one_thread")


def qkv(H_k: int = 4) -> dict[str, Tensor]:
    key, value = (draw(2, H_k, 7, 16, seed=seed) for seed in (1, 2))
    return {"query": draw(2, 4, 5, 16), "key": key, "value": value}


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
    arguments = {**qkv(), **REFUSED[name]}
    errors = []
    for attend in (torch_attention, sdpa.scaled_dot_product_attention):
        try:
            attend(**arguments)
        except (TypeError, RuntimeError, IndexError) as error:
            errors.append(type(error))
    assert len(errors) == 2
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


@pytest.mark.parametrize("name", TORCH_SERVES)
def test_the_rest_is_torchs_bit_for_bit(served, name):
    arguments = {**qkv(), **TORCH_SERVES[name]}
    ours = sdpa.scaled_dot_product_attention(**arguments)
    assert torch.equal(ours, torch_attention(**arguments))
    assert served == []
    assert sdpa.explain(**arguments).reasons["triton"]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_torchs(served):
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    o = sdpa.scaled_dot_product_attention(x, x, x)
    assert o.is_nested
    assert served == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_forward_mode_derivatives_are_torchs(served):
    inputs = {n: x.double().float() for n, x in qkv().items()}

    def of_query(query: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa.scaled_dot_product_attention(query, inputs["key"], inputs["value"])

    query = inputs["query"]
    o, tangent = torch.func.jvp(of_query, (query,), (torch.ones_like(query),))
    assert served == []
    assert tangent.isfinite().all()
    assert o.shape == query.shape


def test_environment_leaves_all_to_torch(served, monkeypatch):
    with torch.device("cpu"):  # a default device is no override
        sdpa.scaled_dot_product_attention(**qkv())
    assert len(served) == 1
    monkeypatch.setenv(dispatch.ENVIRONMENT, "torch")
    sdpa.scaled_dot_product_attention(**qkv())
    assert len(served) == 1
    assert "FASTATTN_BACKEND" in sdpa.explain(**qkv()).reasons["triton"]
