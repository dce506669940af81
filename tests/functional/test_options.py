"""Every option on the torch backend against the oracle: alone, packed, twice derived."""

import torch
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.testing import make_qkv
from fastattn.testing.option_examples import option_examples

B, H_q, H_k, T_q, T_k, D, R = 2, 4, 2, 9, 13, 8, 5
OPTIONS = option_examples(H_q, H_k, T_q, T_k, D, reach=R)


def torch_attention(q, k, v, **options):
    return fastattn.attention(q, k, v, backend="torch", **options)


def test_hidden_scores_that_are_not_numbers_reach_nothing() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)
    hidden = OPTIONS["padding"]["key_padding_mask"]
    bias = torch.zeros(B, 1, 1, T_k).masked_fill(~hidden[:, None, None], torch.nan)
    options = {**OPTIONS["padding"], **OPTIONS["score-mod"]}
    o = torch_attention(q, k, v, attn_bias=bias, **options)
    assert torch.equal(o, torch_attention(q, k, v, attn_bias=torch.zeros(1, 1), **options))
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


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
