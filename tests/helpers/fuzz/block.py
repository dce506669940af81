"""`attention_block_forward` and its backward as one function that autograd knows."""

from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.testing.compare import DIFFERENTIABLE


def attention_block(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any
) -> Any:
    """o, or (o, lse), of a part that has all keys, differentiable by its own backward."""
    names = [
        name for name in DIFFERENTIABLE
        if isinstance(options.get(name), Tensor) and options[name].requires_grad
    ]  # fmt: skip
    leaves = [options[name] for name in names]
    o, lse = _Block.apply(options, names, q, k, v, *leaves)
    return (o, lse) if return_lse else o


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: dict[str, Any], names: list[str], q: Tensor, k: Tensor, v: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, lse = fastattn.attention_block_forward(q, k, v, **options)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.names = options, names
        ctx.save_for_backward(q, k, v, o, lse, *leaves)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, o, lse, *_ = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        actual = fastattn.attention_block_backward(do, q, k, v, o, lse, dlse=dlse, **ctx.options)
        learned = (actual.of_options[name] for name in ctx.names)
        return None, None, actual.dq, actual.dk, actual.dv, *learned
