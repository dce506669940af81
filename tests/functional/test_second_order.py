"""Double backward: which calls go to the formula, and maps of it. Generated calls have the rest."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.ops.derivatives import second_order
from fastattn.testing.inputs import draws

LEFT = {
    "attn_bias needs a gradient": {"attn_bias": draws()(1, 1, 5, 5)},
    "relative_keys has no kernel": {"relative_keys": draws()(1, 7, 16)},
}


@pytest.mark.parametrize("reason", LEFT)
def test_the_formula_serves_the_rest(
    reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str | None] = []

    def why(*arguments: Any) -> str | None:
        reasons.append(why_no_second(*arguments))
        return reasons[-1]

    why_no_second = second_order.why_no_second
    monkeypatch.setattr(second_order, "why_no_second", why)
    leaves = {"q": draws()(1, 2, 5, 16), **LEFT[reason]}
    q, x = (y.to(device).requires_grad_() for y in leaves.values())
    o = fastattn.attention(q, q, q, **{[*leaves][1]: x}, backend="triton")
    grads = torch.autograd.grad(o.sin().sum(), (q, x), create_graph=True)
    torch.autograd.grad([dx.sin().sum() for dx in grads], (q, x))
    assert reasons and all(x is not None and x.startswith(reason) for x in reasons)


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_second_gradients_at_once() -> None:
    """Maps over calls, by torch's old function and its new one."""
    q = draws(dtype=torch.float64)(1, 1, 5, 3).requires_grad_()
    o = fastattn.attention(q, q, q, causal=True, backend="torch")
    (first,) = torch.autograd.grad(o.sin().sum(), q, create_graph=True)

    def second(dy: Tensor, **how: Any) -> Tensor:
        return torch.autograd.grad(first, q, dy, retain_graph=True, **how)[0]

    dys = draws(seed=1, dtype=torch.float64)(2, *q.shape)
    expected = torch.stack([second(dy) for dy in dys])
    torch.testing.assert_close(second(dys, is_grads_batched=True), expected)
    torch.testing.assert_close(torch.vmap(second)(dys), expected)
