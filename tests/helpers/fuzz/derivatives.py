"""Derivatives that are judged in place of a case's results: tangents and double backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.ops.derivatives import second_order, transforms
from fastattn.testing.compare import learned_names

from .cases import DERIVED, Case

Function = Callable[..., Any]
Tensors = dict[str, Tensor]
# Ways to the formula, which would be right where kernels serve.
BY_FORMULA = (
    (second_order, "_by_formula"), (second_order, "differentiable_gradients"),
    (transforms, "gradients_by_formula"),
)  # fmt: skip
# torch's own function leaves the mask of no queries out of its graph: its gradient is 0.
_WITH_GRAPH: dict[str, Any] = {"create_graph": True, "materialize_grads": True}


def derived(case: Case, function: Function, push: Function) -> Function:
    """The function, or what the case's traits make of it, with results of the same dtypes.

    push: how tangents are computed.
    """
    if not case.traits & DERIVED:
        return function

    def call(*args: Any, return_lse: bool, **options: Any) -> Any:
        tensors = dict(zip("qkv", args, strict=False))
        tensors |= {name: options.pop(name) for name in learned_names(options)}

        def of(**changed: Tensor) -> Sequence[Tensor]:
            given = tensors | changed
            rows = [given.pop(name) for name in "qkv"]
            results = function(*rows, *args[3:], **given, **options, return_lse=return_lse)
            return results if return_lse else (results,)

        twice = "twice" in case.traits
        results = _gradients(case, of, tensors) if twice else _moved(case, of, tensors, push)
        return results if return_lse else results[0]

    return call


def _moved(case: Case, of: Function, tensors: Tensors, push: Function) -> tuple[Tensor, ...]:
    """Results with their tangents added, where some of the tensors have one."""
    draw = case.random("tangents")
    able = [name for name, x in tensors.items() if 0 not in x.stride()]  # by torch
    some = draw.some(able, draw.integer(1, len(able)))
    # Of hidden numbers, which may be NaN or infinite, it is 0.
    moves = {
        name: _like(case, name, tensors[name]) * tensors[name].nan_to_num(0.0, 0.0, 0.0)
        for name in some
    }
    return tuple(x if dx is None else x + dx for x, dx in push(of, tensors, moves))


def _like(case: Case, name: str, x: Tensor) -> Tensor:
    """Random numbers that are the same in every dtype."""
    return case.random(f"direction/{name}").normal(*x.shape).bfloat16().to(x)


def by_levels(of: Function, tensors: Tensors, moves: Tensors) -> Any:
    """Results and their tangents, by torch.autograd.forward_ad."""
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(tensors[name], dx) for name, dx in moves.items()}
        return [forward_ad.unpack_dual(x) for x in of(**duals)]


def by_transform(of: Function, tensors: Tensors, moves: Tensors) -> Any:
    """Results and their tangents, by torch.func."""
    names = [*moves]
    moved = tuple(tensors[name] for name in names)
    pairs = torch.func.jvp(
        lambda *x: tuple(of(**dict(zip(names, x, strict=True)))), moved, tuple(moves.values())
    )
    return zip(*pairs, strict=True)


def by_reverse(of: Function, tensors: Tensors, moves: Tensors) -> Any:
    """Results and their tangents: derivatives of gradients, linear in what these are of."""
    with torch.enable_grad():
        given = {name: _leaf(tensors[name]) for name in moves}
        results = of(**given)
        pairs = [(x, torch.zeros_like(x, requires_grad=True)) for x in results if x.requires_grad]
        if not pairs:
            return [(x, None) for x in results]
        outer, us = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outer, [*given.values()], us, **_WITH_GRAPH)
        tangents = iter(torch.autograd.grad(grads, us, [*moves.values()], **_WITH_GRAPH))
    return [(x, next(tangents) if x.requires_grad else None) for x in results]


def _leaf(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _gradients(case: Case, of: Function, tensors: Tensors) -> tuple[Tensor, ...]:
    """Two of the gradients of a loss that is not linear in results."""
    results = of()
    wanted = [name for name, x in tensors.items() if x.requires_grad]
    rows = [name for name in wanted if name in ("q", "k", "v")]
    if not rows or not results[0].requires_grad:
        return tuple(results)
    finite = [x.masked_fill(x.isinf(), 0.0) for x in results]
    loss = sum((_like(case, str(n), x) * x.square()).sum() for n, x in enumerate(finite))
    draw = case.random("twice")
    of_tensors = [tensors[x] for x in (draw.choice(*rows), draw.choice(*wanted))]
    grads: tuple[Tensor, ...] = torch.autograd.grad(loss, of_tensors, **_WITH_GRAPH)
    return grads
