"""Options that are numbers: Python's, numpy's and tensors of no dims count as the same."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.functional import call_memo, call_options
from fastattn.models.gpt import GPTConfig
from fastattn.options import Options
from fastattn.testing import make_qkv

# Every option of a call that is a number, each given a value that changes the result.
NUMBERS = {
    "causal": True, "window": 3, "keep_first": 1, "stride": 2, "prefix_lengths": 2,
    "query_offset": 1, "scale": 0.5, "softcap": 2.0, "dropout": 0.25, "deterministic": False,
    "batch_invariant": True,
}  # fmt: skip
BESIDE = {"keep_first": {"window": 2}, "prefix_lengths": {"causal": True}}


def inputs() -> tuple[Tensor, ...]:
    return make_qkv(B=1, H_q=2, H_k=1, T_q=6, T_k=6, D=16, requires_grad=False)


def forms(x: Any) -> list[Any]:
    """x as numpy and torch have it."""
    array = np.asarray(x)
    return [array[()], array, torch.tensor(x)]


def checked(**options: Any) -> Options:
    return call_options.dense_options(*inputs(), **options)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_numpy_or_torch_becomes_pythons(name: str) -> None:
    x, beside = NUMBERS[name], BESIDE.get(name, {})
    expected = checked(**beside, **{name: x})
    assert expected != checked(**beside) or name == "prefix_lengths"
    for other in forms(x):
        values = checked(**beside, **{name: other})
        for field, want, got in zip(Options._fields, expected, values, strict=True):
            assert type(got) is type(want), field
            same = torch.equal(got, want) if isinstance(want, Tensor) else got == want
            assert same, field


def test_what_has_no_effect_becomes_pythons_too() -> None:
    nothing = {"keep_first": np.int64(0), "dropout": np.float32(0), "causal": np.bool_(False)}
    values = checked(**nothing)
    assert values == checked()
    assert {type(x) for x in values} <= {bool, int, float, tuple, type(None)}


def test_a_tensor_is_read_in_every_call(device: str) -> None:
    q, k, v = (x.to(device) for x in inputs())
    scale = torch.tensor(0.5)
    call_memo.forget()
    for x in (0.5, 2.0):
        scale.fill_(x)
        values = fastattn.attention(q, k, v, scale=scale, backend="triton")
        assert torch.equal(values, fastattn.attention(q, k, v, scale=x, backend="triton"))


def test_layers_and_configs_keep_pythons_numbers() -> None:
    options: dict[str, Any] = {
        "causal": True, "window": 4, "keep_first": 2, "stride": 3, "dropout": 0.5,
        "attention_dropout": 0.25, "softcap": 2.0, "scale": 0.5,
    }  # fmt: skip
    for values in zip(*map(forms, options.values()), strict=True):
        named = dict(zip(options, values, strict=True))
        layer = fastattn.GQAttention(16, 2, **named)
        assert {name: getattr(layer, name) for name in named} == options
        assert all(type(getattr(layer, name)) is type(x) for name, x in options.items())
    assert fastattn.GQAttention(16, 2, window=(np.int64(1), None)).window == (1, None)
    config = GPTConfig(vocab_size=np.int64(9), context_length=8, window=np.int32(4))
    assert type(config.vocab_size) is type(config.window) is int
