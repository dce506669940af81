"""Tensors without values of their own are refused by name; nested sequences go packed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import fastattn
from fastattn.testing import assert_within_budget

LENGTHS = (3, 5)
DENSE = torch.zeros(2, 2, 5, 8)
PACKED = torch.zeros(8, 2, 8)


def sequences() -> list[Tensor]:
    return [torch.randn(T, 2, 8) for T in LENGTHS]


@pytest.fixture(params=["jagged", "strided", "coo", "causal", "numpy", "list"])
def odd(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """Something like q, and what a message says of it."""
    if request.param == "jagged":
        nested = torch.nested.nested_tensor(sequences(), layout=torch.jagged)
        return nested.transpose(1, 2), "nested .* attention_varlen .* offsets"
    if request.param == "strided":
        return torch.nested.nested_tensor(sequences(), layout=torch.strided), "nested .* offsets"
    if request.param == "coo":
        return DENSE.to_sparse(), r"got torch\.sparse_coo: call to_dense\(\)"
    if request.param == "causal":
        return causal_lower_right(5, 5), "got a CausalBias: pass causal=True"
    if request.param == "numpy":
        return DENSE.numpy(), r"a torch\.Tensor, got numpy\.ndarray"
    return DENSE.tolist(), r"a torch\.Tensor, got list"


CACHE = fastattn.KVCache(2, 2, 8, 8)
CALLS = {
    "q": lambda x: fastattn.attention(x, x, x),
    "q over a cache": lambda x: fastattn.decode_attention(x, CACHE),
    "k to append": lambda x: CACHE.append(x, x),
    "k": lambda x: fastattn.attention(DENSE, x, DENSE),
    "v": lambda x: fastattn.attention_varlen(PACKED, PACKED, x, torch.tensor([0, 3, 8])),
    "key_lengths": lambda x: fastattn.attention(DENSE, DENSE, DENSE, key_lengths=x),
    "attn_bias": lambda x: fastattn.attention(DENSE, DENSE, DENSE, attn_bias=x),
    "sinks": lambda x: fastattn.attention(DENSE, DENSE, DENSE, sinks=x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_dense_is_refused(name: str, odd: tuple[Any, str]) -> None:
    x, message = odd
    argument = name.split()[0]
    if name == "key_lengths":  # of a dtype that it may not have either
        message = "an int32 or int64 tensor, got"
    elif not isinstance(x, Tensor) and argument not in "qkv":
        message = "float tensor .*, got"
    with pytest.raises(TypeError, match=f"^{argument} must be .*{message}"):
        CALLS[name](x)
    assert CACHE.length_bound == 0


def test_jagged_values_and_offsets_are_a_packed_call() -> None:
    nested = torch.nested.nested_tensor(sequences(), layout=torch.jagged)
    x = nested.values()
    actual = fastattn.attention_varlen(x, x, x, nested.offsets(), causal=True)
    for part, one in zip(actual.split(LENGTHS), nested.unbind(), strict=True):
        q = one.transpose(0, 1)[None]
        naive = fastattn.reference.attention(q, q, q, causal=True)
        exact = fastattn.reference.attention(*(q.double(),) * 3, causal=True)
        assert_within_budget("o", part.transpose(0, 1)[None], exact, naive)
