"""Gradients of gradients, a few queries at a time: values at each order, and memory."""

from typing import Any

import pytest
import torch
from held import Held
from torch import Tensor

import fastattn
from fastattn.ops import gradients
from fastattn.options import LEARNED, Options
from fastattn.testing.inputs import draws
from fastattn.torch_backend import double_backward
from fastattn.torch_backend.query_chunks import Part

H_q, H_k, T_q, T_k, D = 2, 1, 5, 6, 3
draw = draws(dtype=torch.float64)
CASES = {
    "plain": Options(),
    "causal": Options(causal=True, query_offsets=torch.tensor([1])),
    "bias, sinks": Options(attn_bias=draw(1, 1, T_q, T_k), sinks=draw(H_q)),
    "bias of keys": Options(attn_bias=draw(1, H_q, 1, T_k)),
    "dropout": Options(dropout=0.3, dropout_seed=torch.tensor([5, 6])),
    "packed": Options(
        cu_seqlens_q=torch.tensor([0, 0, 4, T_q]),
        cu_seqlens_k=torch.tensor([0, 1, 3, T_k]),
        query_offset=None,
        dropout=0.3,
        dropout_seed=torch.tensor([5, 6]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_order(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queries a part and a remainder: gradients beside those of all queries; differences."""
    monkeypatch.setattr(double_backward, "_SCORES", 2 * H_q * T_k)
    options = CASES[case]
    learned = [name for name in LEARNED if getattr(options, name) is not None]
    shapes = (H_q, T_q, D), (H_k, T_k, D), (H_k, T_k, D)
    inputs = [*(draw(1, *shape) for shape in shapes), *map(options.__getattribute__, learned)]
    inputs += draw(1, H_q, T_q, D), draw(1, H_q, T_q)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def laid_out(*tensors: Tensor) -> tuple[Any, ...]:
        q, k, v, *fields = tensors
        return q, k, v, options._replace(**dict(zip(learned, fields, strict=True)))

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        *given, do, dlse = tensors
        q, k, v, options = laid_out(*given)
        needed = [x is not None for x in (q, k, v, *options.differentiable)]
        grads = gradients.differentiable_gradients(q, k, v, options, needed, do, dlse)
        return tuple(x for x in grads if x is not None)

    *given, do, dlse = leaves
    q, k, v, whole = laid_out(*given)
    part = Part(0, 0, slice(None), slice(None), whole)
    results = gradients.formula_of(part)(q, k, v, *whole.differentiable)
    expected = torch.autograd.grad(results, given, (do, dlse.to(results[1])))
    torch.testing.assert_close(gradient(*leaves), expected)
    assert torch.autograd.gradcheck(gradient, leaves, fast_mode=True)
    if case == "bias, sinks":
        assert torch.autograd.gradgradcheck(gradient, leaves, fast_mode=True)


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_second_gradients_at_once() -> None:
    """Both of torch's maps over calls have to see through the parts."""
    q = draw(1, 1, T_q, D).requires_grad_()
    o = fastattn.attention(q, q, q, causal=True, backend="torch")
    (first,) = torch.autograd.grad(o.sin().sum(), q, create_graph=True)

    def second(dy: Tensor, **how: Any) -> Tensor:
        return torch.autograd.grad(first, q, dy, retain_graph=True, **how)[0]

    dys = draw(2, *q.shape)
    expected = torch.stack([second(dy) for dy in dys])
    torch.testing.assert_close(second(dys, is_grads_batched=True), expected)
    torch.testing.assert_close(torch.vmap(second)(dys), expected)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the queries and keys take twice at most, between the gradients and in each."""
    monkeypatch.setattr(double_backward, "_SCORES", 2**15)
    peaks = []
    for T in (512, 1024):
        x = draws()(1, 1, T, 8).requires_grad_()
        with Held() as held:
            o = fastattn.attention(x, x, x, causal=True, backend="torch")
            (first,) = torch.autograd.grad(o.sin().sum(), x, create_graph=True)
            between = held.now()
            torch.autograd.grad(first.sin().sum(), x)
        assert held.largest <= 2**15
        peaks.append((between, held.most))
    assert all(twice <= 2 * once for once, twice in zip(*peaks, strict=True))


def test_memory_behind_tangents(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The backward of tangents that a kernel pushed."""
    T = 96
    monkeypatch.setattr(double_backward, "_SCORES", 8 * T)
    x = draws()(1, 1, T, 16).to(device).requires_grad_()

    def attend(y: Tensor) -> Tensor:
        return fastattn.attention(y * x, x, x, backend="triton")

    _, tangent = torch.func.jvp(attend, (x.detach(),), (x.detach().cos(),))
    with Held() as held:
        torch.autograd.grad(tangent.sum(), x)
    assert held.largest == T * 16
