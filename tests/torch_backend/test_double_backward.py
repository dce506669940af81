"""Double backward by the formula, against differences; by kernels, see test_second_order."""

from typing import Any

import pytest
import torch
from scores_in_memory import in_chunks
from torch import Tensor

import fastattn
from fastattn.testing.inputs import draws

H_q, H_k, T_q, T_k, D = 2, 1, 5, 6, 3
draw = draws(dtype=torch.float64)
SEED = {"dropout": 0.3, "dropout_seed": torch.tensor([5, 6])}
CASES: dict[str, dict[str, Any]] = {
    "fused": {"causal": True},
    "fused, bias of keys": {"attn_bias": draw(1, H_q, 1, T_k)},
    "bias, sinks": {"attn_bias": draw(1, 1, T_q, T_k), "sinks": draw(H_q)},
    "scores": {"softcap": 2.0, "relative_bias": draw(H_q, 3), "window": 3},
    "relative keys": {"relative_keys": draw(H_q, 3, D), "query_offset": torch.tensor([1])},
    "two products": {"query2": draw(1, H_q, T_q, 2), "key2": draw(1, 1, T_k, 2), **SEED},
    "packed": {
        "cu_seqlens_q": torch.tensor([0, 0, 4, T_q]),
        "cu_seqlens_k": torch.tensor([0, 1, 3, T_k]),
        "sinks": draw(H_q),
        **SEED,
    },
}


def leaves_of(options: dict[str, Any]) -> tuple[list[str], list[Tensor]]:
    """Names and values of q, k, v and the options that learn."""
    given = {"q": draw(1, H_q, T_q, D), "k": draw(1, H_k, T_k, D), "v": draw(1, H_k, T_k, D)}
    if "cu_seqlens_q" in options:
        given = {name: x[0].transpose(0, 1) for name, x in given.items()}
    learned = {
        x: y for x, y in options.items() if isinstance(y, Tensor) and y.dtype.is_floating_point
    }
    given |= learned
    return [*given], [x.clone().requires_grad_() for x in given.values()]


@pytest.mark.parametrize("at_once", [2**22, 12])
@pytest.mark.parametrize("case", CASES)
def test_second_derivatives_are_those_of_differences(
    case: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls at once, and in chunks of a query."""
    in_chunks(monkeypatch, at_once)
    options = CASES[case]
    names, leaves = leaves_of(options)
    packed = "cu_seqlens_q" in options
    attend = fastattn.attention_varlen if packed else fastattn.attention

    def function(*tensors: Tensor) -> Any:
        return attend(**options | dict(zip(names, tensors, strict=True)), backend="torch")

    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_second_gradients_at_once() -> None:
    """Maps over calls, by torch's old function and its new one."""
    q = draw(1, 1, T_q, D).requires_grad_()
    o = fastattn.attention(q, q, q, causal=True, backend="torch")
    (first,) = torch.autograd.grad(o.sin().sum(), q, create_graph=True)

    def second(dy: Tensor, **how: Any) -> Tensor:
        return torch.autograd.grad(first, q, dy, retain_graph=True, **how)[0]

    dys = draw(2, *q.shape)
    expected = torch.stack([second(dy) for dy in dys])
    torch.testing.assert_close(second(dys, is_grads_batched=True), expected)
    torch.testing.assert_close(torch.vmap(second)(dys), expected)
