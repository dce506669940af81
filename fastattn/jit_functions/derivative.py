"""Derivatives of users' score functions, as generated source.

A score_mod runs once on `Symbol`s, which record each operation. Reverse accumulation over this
graph gives the gradients of the score and of every element loaded from a float tensor, as further
nodes. A @triton.jit function is generated from the operations that they need.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import stand_ins, symbols
from .symbols import LANGUAGE, Load, Pointer, Symbol, ordered
from .symbols import NotDifferentiable as NotDifferentiable

ARGUMENTS = ("x", "b", "h", "q_pos", "k_pos")


class Graph(NamedTuple):
    """A score_mod as a graph, after reverse accumulation.

    dx: the gradient of the score, from the Symbol "dx". loads, of_loads: loads of floats, and their
    gradients.
    """

    dx: Any
    loads: list[Load]
    of_loads: list[Any]


def differentiated(mod: Any, tensors: Sequence[Tensor]) -> Graph:
    """The graph of score_mod(x, b, h, q_pos, k_pos, *tensors) and of its gradients.

    Raises:
        NotDifferentiable: an operation has no known derivative.
    """
    loads: list[Load] = []
    leaves = [Symbol(name, active=name == "x") for name in ARGUMENTS]
    pointers = [Pointer(n, x.dtype.is_floating_point, 0, loads) for n, x in enumerate(tensors)]
    try:
        result = stand_ins.over(LANGUAGE, mod)(*leaves, *pointers)
    except (TypeError, AttributeError, RecursionError) as error:
        raise NotDifferentiable(f"it does what cannot be followed: {error}") from error
    dy: Any = Symbol("dx", active=False)
    of: dict[Any, Any] = _accumulated(result, dy) if isinstance(result, Symbol) else {}
    zero = dy * 0.0
    return Graph(of.get(leaves[0], zero), loads, [of.get(load.symbol, zero) for load in loads])


def _accumulated(root: Symbol, dy: Any) -> dict[Symbol, Any]:
    """The gradient of each active symbol below the root."""
    of: dict[Symbol, Any] = {root: dy}
    for y in reversed(ordered(root)):
        if not y.active or y.rule is None or y not in of:
            continue
        for x, dx in zip(y.operands, y.rule(y, of[y], *y.operands), strict=True):
            if isinstance(x, Symbol) and x.active and dx is not None:
                of[x] = of[x] + dx if x in of else dx
    return of


def _function(tensors: int, *roots: Any) -> Any:
    """A @triton.jit function (dx, x, b, h, q_pos, k_pos, *tensors): the roots."""
    names = (f"tensor_{n}" for n in range(tensors))
    return symbols.function("score_mod_grad", ("dx", *ARGUMENTS, *names), *roots)


def score_mod_grad(mod: Any, tensors: Sequence[Tensor]) -> Any:
    """The score_mod_grad of a score_mod, as a @triton.jit function; raises as `differentiated`."""
    # Equal sources share one function. Derived in each call, as globals may have changed.
    return _function(len(tensors), differentiated(mod, tensors).dx)


def load_gradients(
    mod: Any, tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Any, list[int]]:
    """Gradients of the loads from wanted tensors: a @triton.jit function, and each load's tensor.

    The function has the arguments of score_mod_grad, and returns for each load its offset and its
    gradient, in turn. An offset has size 1 along positions that it does not depend on.

    Raises:
        NotDifferentiable: an operation has no known derivative.
    """
    graph = differentiated(mod, tensors)
    roots: list[Any] = []
    read: list[int] = []
    for load, gradient in zip(graph.loads, graph.of_loads, strict=True):
        if wanted[load.tensor]:
            # A constant offset becomes a value too.
            offset = Symbol("{} * 0 + {}", Symbol("b", active=False), load.offset)
            roots += [offset, gradient]
            read.append(load.tensor)
    return _function(len(tensors), *roots), read
