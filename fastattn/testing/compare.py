"""Attention against the oracle: outputs, lse and every gradient, within the error budget."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .budget import assert_within_budget

NAMES = ("o", "lse", "dq", "dk", "dv")


def assert_matches_reference(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    clean: tuple[Tensor, Tensor, Tensor] | None = None,
    **arguments: Any,
) -> None:
    """Hold o, lse, dq, dk and dv of `attention` to the oracle's.

    Args:
        attention: called as attention(q, k, v, return_lse=True, **arguments).
        q, k, v: leaf tensors that require grad, drawn in the tested dtype.
        clean: what the oracle gets instead of q, k, v, where those hold NaN in padded-out places.
        arguments: masks, scale and so on, passed to both.

    Raises:
        AssertionError: a result that is not finite, or past its budget.
    """
    ours = results(attention, q, k, v, **arguments)
    originals = clean if clean is not None else (q, k, v)
    ref = results(reference.attention, *(x.detach().double() for x in originals), **arguments)
    naive = results(reference.attention, *(x.detach() for x in originals), **arguments)
    for name, x, exact, plain in zip(NAMES, ours, ref, naive, strict=True):
        assert_within_budget(name, x, exact, plain)


def results(
    attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv for fixed random gradients of o and lse, the same for every dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = attention(q, k, v, return_lse=True, **arguments)
    generator = torch.Generator().manual_seed(1)
    # Drawn in bf16, which every dtype holds, so that all are given the same gradients.
    do, dlse = (
        torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in (o, lse)
    )
    grads = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    return (o.detach(), lse.detach(), *grads)
