"""Additive attention: gradients, memory and errors; errors of dot-product and multiplicative."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from held import Held
from torch import Tensor

import fastattn
from fastattn.testing import make_qkv, worst_naive
from fastattn.testing.budget import assert_within_budget
from fastattn.testing.inputs import draws
from fastattn.testing.verify.scoring import ADDITIVE_RESULTS as NAMES
from fastattn.testing.verify.scoring import additive_formula as naive
from fastattn.testing.verify.scoring import additive_results as results
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


def test_gradients_of_additive_kernels_repeat_to_the_bit(device: str) -> None:
    arguments = {"return_lse": True, "backend": "triton", "causal": True}
    tensors = [x[:1] if x.dim() == 4 else x for x in inputs(device=device, projected=True)]
    first = results(fastattn.additive_attention, tensors, **arguments)
    again = results(fastattn.additive_attention, tensors, **arguments)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_gradient_of_o_alone_and_of_lse_alone(device: str) -> None:
    """Each is the part of their sum that the other does not have."""
    tensors = [x[:1] if x.dim() == 4 else x for x in inputs(device=device, projected=True)]
    q, k, v, u = (x.detach().requires_grad_() for x in tensors)
    o, lse = fastattn.additive_attention(q, k, v, u, return_lse=True, backend="triton")
    both = torch.autograd.grad((o.sum(), lse.sum()), (q, k, u), retain_graph=True)
    of_o = torch.autograd.grad(o.sum(), (q, k, u), retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, u))
    for whole, x, y in zip(both, of_o, of_lse, strict=True):
        torch.testing.assert_close(x + y, whole)
        assert x.abs().max() > 1e-3
        assert y.abs().max() > 1e-3


def test_autocast_takes_its_dtype_and_computes_in_fp32() -> None:
    q, k, v, u = (x.detach() for x in inputs(projected=True))
    with torch.autocast("cpu", torch.bfloat16):
        o = fastattn.additive_attention(q, k, v, u, backend="torch")
    low = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(o, fastattn.additive_attention(*low, u, backend="torch"))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_in_padding_reaches_no_gradient_of_a_projection(backend: str, device: str) -> None:
    q, k, v, u, w_query, w_key = (x.detach() for x in inputs(device))
    mask = torch.arange(T_k, device=device).expand(B, T_k) % 4 > 0
    unseen = ~mask[:, None, :, None]

    def gradient(value: float) -> Tensor:
        weight = w_key.clone().requires_grad_()
        rows = (q, k.masked_fill(unseen, value), v, u, w_query, weight)
        o = fastattn.additive_attention(*rows, key_padding_mask=mask, backend=backend)
        return torch.autograd.grad(o.square().sum(), weight)[0]

    clean = gradient(0.0)
    assert clean.count_nonzero()
    assert torch.equal(gradient(torch.nan), clean)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_second_derivatives(backend: str, device: str) -> None:
    def penalty(function: Any, tensors: list[Tensor], **arguments: Any) -> list[Tensor]:
        o, lse = function(*tensors, causal=True, **arguments)
        grads = torch.autograd.grad(o.square().sum() + lse.sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), tensors)

    tensors = [x[:, :, :6] if x.dim() == 4 else x for x in inputs(device=device)]
    tensors = [x.detach().requires_grad_() for x in tensors]
    ours = penalty(fastattn.additive_attention, tensors, return_lse=True, backend=backend)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    ref = penalty(naive, wide)
    plain = worst_naive(ref, lambda: penalty(naive, tensors))
    for n, (x, exact, rough) in enumerate(zip(ours, ref, plain, strict=True)):
        assert_within_budget(f"input {n}", x, exact, rough)


def test_torch_never_holds_all_hidden_values(monkeypatch) -> None:
    tensors = inputs()
    whole = results(fastattn.additive_attention, tensors, return_lse=True, causal=True)
    rows = 2
    monkeypatch.setattr(additive, "_HIDDEN", rows * B * H_q * T_k * HIDDEN)
    with Held() as held:
        parts = results(
            fastattn.additive_attention, tensors, return_lse=True, causal=True, backend="torch"
        )
    for name, x, y in zip(NAMES, parts, whole, strict=True):
        torch.testing.assert_close(x, y, msg=name)
    assert rows * B * H_q * T_k * HIDDEN <= held.largest < B * H_q * T_q * T_k * HIDDEN / 4


@pytest.fixture
def allocations(monkeypatch) -> Iterator[list[Tensor]]:
    """Every tensor that is allocated by a torch.empty in the test."""
    made: list[Tensor] = []
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        allocate = getattr(owner, name)

        def noting(*args, allocate=allocate, **kwargs):
            made.append(allocate(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(owner, name, noting)
    yield made


def test_additive_kernels_allocate_nothing_of_all_scores(allocations, device: str) -> None:
    T = 64
    q, k, v = make_qkv(1, 1, 1, T, T, 4, device=device)
    u = torch.ones(4, device=device, requires_grad=True)
    o = fastattn.additive_attention(q, k, v, u, window=9, backend="triton")
    torch.autograd.grad(o.sum(), (q, k, v, u))
    assert len(allocations) >= 7
    assert max(x.numel() for x in allocations) <= q.numel()


def test_additive_operators_tell_tracers_what_they_return(device: str) -> None:
    tensors = inputs(device=device)
    wanted = results(
        fastattn.additive_attention, tensors, return_lse=True, backend="triton", causal=True
    )
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        o, lse = fastattn.additive_attention(*fakes, return_lse=True, backend="triton", causal=True)
        actual = [o, lse, *torch.autograd.grad((o.sum(), lse.sum()), fakes)]
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in wanted]
