"""Gradients that can be differentiated again, from a formula that torch differentiates."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_with_graph(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of function(*inputs), with a graph of their own.

    Args:
        function: made of torch's differentiable operations.
        inputs: its arguments. Some may be one tensor, or computed from one another.
        needed: which of them need a gradient.
        gradients: with respect to what the function returns; None = zero.

    Returns:
        One for each input, None where none is needed or the result does not depend on it.
    """
    # Each through a view of its own: else what reaches one input by way of another, from which it
    # was computed before, would be counted here and in the graph outside again.
    seen = [None if x is None else x.view_as(x) for x in inputs]
    with torch.enable_grad():
        outputs = function(*seen)
        pairs = [
            (y, dy.to(y.dtype))
            for y, dy in zip(outputs, gradients, strict=True)
            if dy is not None and y.requires_grad
        ]
        wanted = [x for x, need in zip(seen, needed, strict=True) if need and x is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [dy for _, dy in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for need in needed]
