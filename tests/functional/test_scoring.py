"""Additive attention: gradients, memory, backends and compilers."""

from functools import partial
from typing import Any

import torch
from held import Held
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fastattn
from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_within_budget
from fastattn.testing.calls import additive_formula as naive
from fastattn.testing.compare import results
from fastattn.testing.inputs import draws
from fastattn.torch_backend import additive

B, H_q, H_k, T_q, T_k, HIDDEN = 2, 2, 1, 18, 21, 3


def inputs(device: str = "cpu", *, projected: bool = False) -> list[Tensor]:
    """q, k, v, u, and where they are not projected already w_query and w_key."""
    draw = partial(draws(0, device), grad=True)
    if projected:
        q, k = draw(B, H_q, T_q, HIDDEN), draw(B, H_k, T_k, HIDDEN)
        return [q, k, draw(B, H_k, T_k, 3), draw(H_q, HIDDEN)]
    q, k, v, u = draw(B, H_q, T_q, 4), draw(B, H_k, T_k, 6), draw(B, H_k, T_k, 3), draw(HIDDEN)
    return [q, k, v, u, draw(HIDDEN, 4), draw(HIDDEN, 6)]


def given(function: Any, tensors: list[Tensor], **masks: Any) -> tuple[Tensor, ...]:
    """o, lse and the gradients of all tensors."""
    weights = dict(zip(("u", "w_query", "w_key"), tensors[3:], strict=True))
    return results(function, *tensors[:3], **weights, **masks)


def test_gradient_of_o_alone_and_of_lse_alone(device: str) -> None:
    """Each is the part of their sum that the other does not have."""
    tensors = [x[:1] if x.dim() == 4 else x for x in inputs(device=device, projected=True)]
    q, k, v, u = (x.detach().requires_grad_() for x in tensors)
    o, lse = fastattn.additive_attention(q, k, v, u, return_lse=True)
    both = torch.autograd.grad((o.sum(), lse.sum()), (q, k, u), retain_graph=True)
    of_o = torch.autograd.grad(o.sum(), (q, k, u), retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, u))
    for whole, x, y in zip(both, of_o, of_lse, strict=True):
        torch.testing.assert_close(x + y, whole)
        assert x.abs().max() > 1e-3
        assert y.abs().max() > 1e-3


def test_nan_in_padding_reaches_no_gradient_of_a_projection(device: str) -> None:
    q, k, v, u, w_query, w_key = (x.detach() for x in inputs(device))
    mask = torch.arange(T_k, device=device).expand(B, T_k) % 4 > 0
    unseen = ~mask[:, None, :, None]

    def gradient(value: float) -> Tensor:
        weight = w_key.clone().requires_grad_()
        rows = (q, k.masked_fill(unseen, value), v, u, w_query, weight)
        o = fastattn.additive_attention(*rows, key_padding_mask=mask)
        return torch.autograd.grad(o.square().sum(), weight)[0]

    clean = gradient(0.0)
    assert clean.count_nonzero()
    assert torch.equal(gradient(torch.nan), clean)


def test_second_derivatives(device: str) -> None:
    def penalty(function: Any, tensors: list[Tensor], **arguments: Any) -> list[Tensor]:
        o, lse = function(*tensors, causal=True, **arguments)
        grads = torch.autograd.grad(o.square().sum() + lse.sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), tensors)

    tensors = [x[:, :, :6] if x.dim() == 4 else x for x in inputs(device=device)]
    tensors = [x.detach().requires_grad_() for x in tensors]
    ours = penalty(fastattn.additive_attention, tensors, return_lse=True)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    ref = penalty(naive, wide)
    plain = worst_naive(ref, lambda: penalty(naive, tensors))
    for n, (x, exact, rough) in enumerate(zip(ours, ref, plain, strict=True)):
        assert_within_budget(f"input {n}", x, exact, rough)


def test_never_holds_all_hidden_values(monkeypatch) -> None:
    tensors = inputs()
    masks = {"causal": True, "query_offset": torch.tensor([3, 1])}
    whole = given(fastattn.additive_attention, tensors, **masks)
    rows = 2
    monkeypatch.setattr(additive, "_HIDDEN", rows * B * H_q * T_k * HIDDEN)
    with Held() as held:
        parts = given(fastattn.additive_attention, tensors, **masks)
    for x, y in zip(parts, whole, strict=True):
        torch.testing.assert_close(x, y)
    assert rows * B * H_q * T_k * HIDDEN <= held.largest < B * H_q * T_q * T_k * HIDDEN / 4


def test_a_compiler_gets_one_chunk_of_any_length(device: str) -> None:
    """A loop over chunks would be compiled for each length, as many times as there are chunks."""
    graphs = CompileCounter()

    attend = fastattn.additive_attention
    compiled = torch.compile(attend, backend=graphs, fullgraph=True, dynamic=True)
    for T in (18, 9, 14):
        tensors = [x[:, :, :T].contiguous() if x.dim() == 4 else x for x in inputs(device)]
        for x, y in zip(given(compiled, tensors), given(attend, tensors), strict=True):
            torch.testing.assert_close(x, y)
    assert graphs.frame_count == 1
