"""Double backward: first-order gradients as a differentiable formula."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_with_graph(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
    create_graph: bool = True,
) -> list[Tensor | None]:
    """Differentiable gradients of function(*inputs).

    Args:
        function: composed of differentiable torch operations.
        inputs: its arguments; they may be equal, or depend on one another.
        needed: which of them need a gradient.
        gradients: of the function's results; None = zero.
        create_graph: whether the gradients get a graph, if the inputs have one.

    Returns:
        One per input; None if not needed, or if the result does not depend on it.
    """
    # Use a view of each input: otherwise, if an input depends on another, its contribution would be
    # counted here and again in the outer graph.
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
        grads = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [dy for _, dy in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return [next(grads) if need else None for need in needed]


def _by_transform(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """`gradients_with_graph` for inputs without a graph.

    For torch.func, when a pullback is mapped (jacrev) after its transform has ended.
    """
    places = [i for i, x in enumerate(inputs) if needed[i] and x is not None]

    def of_wanted(*wanted: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(places, wanted, strict=True))
        outputs = function(*(values.get(i, x) for i, x in enumerate(inputs)))
        pairs = zip(outputs, gradients, strict=True)
        return tuple(y for y, dy in pairs if dy is not None)

    outputs, pullback = torch.func.vjp(  # type: ignore[misc]  # three with has_aux alone
        of_wanted, *(inputs[i] for i in places)
    )
    values = [dy for dy in gradients if dy is not None]
    grads = pullback(tuple(dy.to(y.dtype) for y, dy in zip(outputs, values, strict=True)))
    by_place = dict(zip(places, grads, strict=True))
    return [by_place.get(i) for i in range(len(inputs))]


def gradients_by_formula(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """`gradients_with_graph` with all scores in memory; the graph only if autograd records."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():  # views made without grad have no graph
        return gradients_with_graph(function, inputs, needed, gradients, recorded)
