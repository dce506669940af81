"""The passes that ring attention calls, as it calls them."""

import inspect

import pytest
import torch
from calls_of_flash_attn import offsets, oracle
from oracles import assert_by_oracle

import fastattn
from fastattn.compat import flash_attn
from fastattn.compat.flash_attn import passes
from fastattn.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("models_on_torch")


def filled(function, **options):
    """Arguments by name, as projects gather them: those without a default are None at first."""
    spec = inspect.getfullargspec(function)
    defaults = spec.defaults or ()
    padded = (None,) * (len(spec.args) - len(defaults)) + defaults
    arguments = {**dict(zip(spec.args, padded, strict=True)), "softcap": 0.0, **options}
    assert arguments.keys() == set(spec.args)
    return function(**arguments)


PACKED = {"dropout_p": 0, "softmax_scale": 0.3, "alibi_slopes": None}
COMMON = {**PACKED, "window_size_left": -1, "window_size_right": -1}


def test_a_ring_of_two(draw):
    """The second of two devices: its own keys with causal, then the first one's, all of them."""
    q, k, v, do = draw(2, 3, 4, 8), draw(2, 6, 2, 8), draw(2, 6, 2, 8), draw(2, 3, 4, 8)
    own, other = slice(3, None), slice(3)
    parts = []
    for part, causal in ((own, True), (other, False)):
        given = {"q": q, "k": k[:, part], "v": v[:, part], "causal": causal, **COMMON}
        result = filled(passes._flash_attn_forward, return_softmax=False, **given)
        assert len(result) == 4 and result[1].shape == (2, 4, 3)
        parts.append(result[:2])
    lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), 0)
    o = sum(
        part_o * torch.exp(part_lse - lse).transpose(1, 2)[..., None] for part_o, part_lse in parts
    )
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part, causal in ((own, True), (other, False)):
        share, keys, values = (torch.full_like(x, 7.0) for x in (q, k[:, part], v[:, part]))
        delta = filled(
            passes._flash_attn_backward, dout=do, q=q, k=k[:, part], v=v[:, part], out=o,
            softmax_lse=lse, dq=share, dk=keys, dv=values, causal=causal, deterministic=False,
            **COMMON,
        )  # fmt: skip
        naive = (do * o).sum(-1).transpose(1, 2)
        assert_within_budget("delta", delta, (do.double() * o).sum(-1).transpose(1, 2), naive)
        dq += share
        dk[:, part], dv[:, part] = keys, values

    def whole(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o, lse = oracle(*leaves, dtype, causal=True, scale=0.3)
        return [o, lse, *torch.autograd.grad(o, leaves, do.to(dtype))]

    assert_by_oracle((o, lse, dq, dk, dv), whole, names="o lse dq dk dv")


def test_packed(draw, device):
    q, k, v, do = draw(7, 4, 8), draw(9, 2, 8), draw(9, 2, 8), draw(7, 4, 8)
    lengths = {
        "cu_seqlens_q": offsets((3, 4), device),
        "cu_seqlens_k": offsets((4, 5), device),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        how = {"softmax_scale": 0.3, "causal": True, "return_attn_probs": True}
        return flash_attn.flash_attn_varlen_func(*inputs, *lengths.values(), **how)

    wanted = attend(q, k, v)
    out, lse, weights, _ = filled(
        passes._flash_attn_varlen_forward, q=q, k=k, v=v, causal=True, **lengths, **PACKED
    )
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) and weights.numel() == 0
    dq, dk, dv = (torch.full_like(x, 7.0) for x in (q, k, v))
    filled(
        passes._flash_attn_varlen_backward, dout=do, q=q, k=k, v=v, out=out, softmax_lse=lse,
        dq=dq, dk=dk, dv=dv, causal=True, deterministic=True, **lengths, **COMMON,
    )  # fmt: skip
    grads = torch.autograd.grad(attend(*leaves)[0], leaves, do)
    for name, got, exact in zip(("dq", "dk", "dv"), (dq, dk, dv), grads, strict=True):
        assert_within_budget(name, got, exact.double(), exact)


def test_dropout_is_repeated_by_the_state(draw):
    q, do = draw(1, 6, 2, 8), draw(1, 6, 2, 8)
    dropping = {**COMMON, "dropout_p": 0.5, "causal": False}
    dropping |= {"window_size_left": 3, "window_size_right": 1}
    torch.manual_seed(1)
    out, lse, _, state = filled(
        passes._flash_attn_forward, q=q, k=q, v=q, return_softmax=True, **dropping
    )
    leaf = q.clone().requires_grad_()
    heads = (leaf.transpose(1, 2),) * 3
    dropped = {"dropout": 0.5, "dropout_seed": state}
    again = fastattn.attention(*heads, **dropped, scale=0.3, window=(3, 1)).transpose(1, 2)
    assert_within_budget("out", out, again.double(), again)
    grads = [torch.empty_like(q) for _ in range(3)]
    given = {"dout": do, "q": q, "k": q, "v": q, "out": out, "softmax_lse": lse,
             "deterministic": False, **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
             **dropping}  # fmt: skip
    filled(passes._flash_attn_backward, rng_state=state, **given)
    (wanted,) = torch.autograd.grad(again, leaf, do)
    assert_within_budget("dq + dk + dv", sum(grads), wanted.double(), wanted)
