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
    wanted = [x for x, need in zip(seen, needed, strict=True) if need and x is not None]
    if not all(x.requires_grad for x in wanted):
        return _by_transform(function, seen, needed, gradients)
    with torch.enable_grad():
        outputs = function(*seen)
        pairs = [
            (y, dy.to(y.dtype))
            for y, dy in zip(outputs, gradients, strict=True)
            if dy is not None and y.requires_grad
        ]
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


def _by_transform(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """`gradients_with_graph` of inputs that have no graph.

    So torch.func's own are, where a pullback is mapped (jacrev) after its transform has ended.
    """
    places = [i for i, x in enumerate(inputs) if needed[i] and x is not None]

    def of_wanted(*wanted: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(places, wanted, strict=True))
        outputs = function(*(given.get(i, x) for i, x in enumerate(inputs)))
        pairs = zip(outputs, gradients, strict=True)
        return tuple(y for y, dy in pairs if dy is not None)

    outputs, pullback = torch.func.vjp(  # type: ignore[misc]  # three with has_aux alone
        of_wanted, *(inputs[i] for i in places)
    )
    given = [dy for dy in gradients if dy is not None]
    found = pullback(tuple(dy.to(y.dtype) for y, dy in zip(outputs, given, strict=True)))
    by_place = dict(zip(places, found, strict=True))
    return [by_place.get(i) for i in range(len(inputs))]
