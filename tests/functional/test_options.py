"""Every option on the torch backend against the oracle: alone, packed, twice derived."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.functional import call_options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw
from fastattn.testing.option_examples import option_examples
from fastattn.torch_backend import formula

B, H_q, H_k, T_q, T_k, D, R = 2, 4, 2, 9, 13, 8, 5
OPTIONS = option_examples(H_q, H_k, T_q, T_k, D, reach=R)


def torch_attention(q, k, v, **options):
    return fastattn.attention(q, k, v, backend="torch", **options)


def without_lse(q, k, v, *, return_lse, **options):
    """o as a call without lse gives it, which may come from another kernel."""
    _, lse = torch_attention(q, k, v, return_lse=True, **options)
    return torch_attention(q, k, v, **options), lse


def in_dtype(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    as_q = {
        name: options[name].to(dtype)
        for name in ("relative_keys", "relative_query", "query2", "key2")
        if name in options
    }
    return {**options, **as_q}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(option: str, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, 6, dtype=dtype)
    assert_matches_reference(without_lse, q, k, v, **in_dtype(OPTIONS[option], dtype))


def test_a_packed_sequence_is_a_batch_row() -> None:
    q, k, v = make_qkv(3, 2, 1, 5, D=8, dtype=torch.float64)
    starts = torch.tensor([0, 5, 10, 15], dtype=torch.int32)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    seed = torch.tensor([5, 6])
    options = {"causal": True, "dropout": 0.3, "dropout_seed": seed, "return_lse": True}
    o, lse = fastattn.attention_varlen(*flat, starts, backend="torch", **options)
    dense, dense_lse = torch_attention(q, k, v, **options)
    torch.testing.assert_close(o, dense.transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(lse, dense_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    "name", ["softcap", "relative-query", "sinks", "bias", "score-mod", "dropout"]
)
def test_second_derivatives_of_the_formula(name: str) -> None:
    inputs = make_qkv(1, 2, 1, 3, 4, 2, dtype=torch.float64)
    given = {
        "softcap": {"softcap": 0.7},
        "relative-query": {
            "relative_keys": draw(1, 3, 2).double().requires_grad_(),
            "relative_query": draw(1, 2, 3, 2).double().requires_grad_(),
        },
        "sinks": {"sinks": draw(2).double().requires_grad_()},
        "bias": {"attn_bias": draw(3, 4).double().requires_grad_()},
        "score-mod": OPTIONS["score-mod"],
        "dropout": OPTIONS["dropout"],
    }[name]
    leaves = {key: x for key, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}

    def call(q, k, v, *xs):
        options = {**given, **dict(zip(leaves, xs, strict=True))}
        checked = call_options.dense_options(q, k, v, causal=True, **options)
        return formula.attention(q, k, v, checked, return_lse=True)

    assert torch.autograd.gradgradcheck(call, (*inputs, *leaves.values()), fast_mode=True)


def test_hidden_scores_that_are_not_numbers_reach_nothing() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)
    hidden = OPTIONS["padding"]["key_padding_mask"]
    bias = torch.zeros(B, 1, 1, T_k).masked_fill(~hidden[:, None, None], torch.nan)
    options = {**OPTIONS["padding"], **OPTIONS["score-mod"]}
    o = torch_attention(q, k, v, attn_bias=bias, **options)
    assert torch.equal(o, torch_attention(q, k, v, attn_bias=torch.zeros(1, 1), **options))
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("more", [{}, {"sinks": torch.zeros(H_q)}], ids=["fused", "formula"])
def test_document_padding_reaches_nothing(more: dict[str, Any], poison: float) -> None:
    ids = torch.tensor([[0] * 4 + [1] * 6 + [-1] * 3, [0] * 13])
    clean = make_qkv(B, H_q, H_k, T_k, D=D)
    k, v = (x.detach().masked_fill((ids < 0)[:, None, :, None], poison) for x in clean[1:])
    for function in (torch_attention, without_lse):
        assert_matches_reference(function, clean[0], k, v, clean=clean, documents=ids, **more)


def test_dropout_follows_torchs_generator_and_checkpointing() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)

    def call(q, k, v):
        return torch_attention(q, k, v, dropout=0.5)

    def run(function):
        torch.manual_seed(7)
        o = function(q, k, v)
        return (o, *torch.autograd.grad(o.sin().sum(), (q, k, v)))

    first, again = run(call), run(call)
    saved = run(lambda *inputs: checkpoint(call, *inputs, use_reentrant=False))
    for x, y, z in zip(first, again, saved, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)
    assert not torch.equal(first[0], call(q, k, v))
    torch.manual_seed(7)
    assert torch.equal(first[0], call(q, k, v))
    state = torch.get_rng_state()
    fastattn.explain(q, k, v, dropout=0.5)
    torch_attention(q, k, v)
    assert torch.equal(state, torch.get_rng_state())


def test_autocast_casts_relative_tensors_too() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)
    options = OPTIONS["relative-query"]
    with torch.autocast("cpu", torch.bfloat16):
        o = torch_attention(q, k, v, **options)
    low = {name: x.bfloat16() for name, x in options.items()}
    assert torch.equal(o, torch_attention(*(x.bfloat16() for x in (q, k, v)), **low))
