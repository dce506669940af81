"""Additive attention: memory and compilers; its numbers are those of generated calls."""

from functools import partial
from typing import Any

import torch
from held import Held
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fastattn
from fastattn.testing.compare import results
from fastattn.testing.inputs import draws
from fastattn.torch_backend import additive

B, H_q, H_k, T_q, T_k, HIDDEN = 2, 2, 1, 18, 21, 3


def inputs(device: str = "cpu") -> list[Tensor]:
    """q, k, v, u, w_query and w_key."""
    draw = partial(draws(0, device), grad=True)
    q, k, v, u = draw(B, H_q, T_q, 4), draw(B, H_k, T_k, 6), draw(B, H_k, T_k, 3), draw(HIDDEN)
    return [q, k, v, u, draw(HIDDEN, 4), draw(HIDDEN, 6)]


def given(function: Any, tensors: list[Tensor], **masks: Any) -> tuple[Tensor, ...]:
    """o, lse and the gradients of all tensors."""
    weights = dict(zip(("u", "w_query", "w_key"), tensors[3:], strict=True))
    return results(function, *tensors[:3], **weights, **masks)


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
