"""Scores of two products: what the pairs of options do not meet."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import attention, reference
from fastattn.testing import make_qkv, worst_naive
from fastattn.testing.budget import assert_all_within_budget
from fastattn.testing.inputs import draw


def test_no_key_is_repeated_for_its_heads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels get key2 as it is."""
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", None)
    q, k, v = make_qkv(1, 4, 4, 20, 20, 16, device=device)
    query2, key2 = draw(1, 4, 20, 8).to(device), draw(1, 1, 20, 8).to(device).requires_grad_()
    o = attention(q, k, v, query2=query2, key2=key2, backend="triton")
    o.sum().backward()
    assert key2.grad is not None and key2.grad.shape == key2.shape


def test_heads_of_key2_in_packed_sequences(device: str) -> None:
    """Two query heads to each, in the second sequence too."""
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv(1, 4, 2, 30, 30, 16, device=device))
    query2, key2 = draw(30, 4, 8).to(device), draw(30, 2, 8).to(device)
    inputs = (q, k, v, query2, key2)
    offsets = torch.tensor([0, 13, 30], dtype=torch.int32, device=device)

    def results(module: Any, *inputs: Tensor, **more: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        second = {"query2": leaves[3], "key2": leaves[4]}
        o = module.attention_varlen(*leaves[:3], offsets, causal=True, **second, **more)
        return (o, *torch.autograd.grad(o.square().sum(), leaves))

    exact = results(reference, *(x.double() for x in inputs))
    naive = worst_naive(exact, lambda: results(reference, *inputs))
    names = ("o", "dq", "dk", "dv", "dquery2", "dkey2")
    assert_all_within_budget(names, results(fastattn, *inputs, backend="triton"), exact, naive)


@pytest.mark.parametrize("name", ["k", "key2"])
def test_a_scale_is_required_where_values_are_keys(name: str) -> None:
    """192 of the heads, not 576 of the latents: no default is right."""
    q, latent, rotary = draw(1, 4, 2, 16), draw(1, 1, 5, 16), draw(1, 1, 5, 8)
    query2 = draw(1, 4, 2, 8)
    given = (q, latent, latent) if name == "k" else (query2, rotary, latent)
    more = {"query2": query2, "key2": rotary} if name == "k" else {"query2": q, "key2": latent}
    with pytest.raises(ValueError, match="scale must be given if v is k or key2"):
        attention(*given, **more)
    o = attention(*given, **more, scale=0.2)
    assert torch.allclose(o, reference.attention(*given, **more, scale=0.2), atol=1e-5)
    given = (q, *draw(1, 1, 5, 32).split(16, -1))  # beside one another, as of a projection
    more = {"query2": query2, "key2": rotary}
    expected = reference.attention(*given, **more, scale=24**-0.5)
    assert torch.allclose(attention(*given, **more), expected, atol=1e-5)


def test_who_does_not_take_two_products_says_so() -> None:
    q = draw(1, 2, 16, 16)
    more = {"query2": q[..., :8], "key2": q[:, :1, :, :8]}
    relative = {"relative_keys": draw(1, 3, 16)}
    with pytest.raises(ValueError, match="its kernels do not support relative_keys and"):
        attention(q, q, q, **more, **relative, scale=1.0, backend="triton")
    why = fastattn.explain(q, q, q, **more, deterministic=False, scale=1.0, backend="triton")
    assert why.reasons["one-pass"] == "its kernel does not support key2"
