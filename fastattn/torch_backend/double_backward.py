"""Double backward: first-order gradients as a differentiable formula."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from .. import tracing
from ..options import LAID_AS, LEARNED, Options
from . import formula
from .query_chunks import Part, parts

# Scores in memory at once: 64 MiB in fp32. Double backward holds about twenty such tensors.
_SCORES = 2**24


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


def gradients_in_parts(
    of_part: Callable[[Part], Callable[..., tuple[Tensor, ...]]],
    options: Options,
    names: Sequence[str],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """`gradients_with_graph` of a call in chunks of queries, at every order.

    Only the inputs are saved for higher derivatives. Sums over queries are in order, in fp32 or
    wider. Under tracing or transforms, all scores are in memory.

    Args:
        of_part: returns the function of the inputs for a part of the call.
        options: of the call; LEARNED are ignored.
        names: of each input, or of its primal: "q", "k", "v" or one of LEARNED.
        inputs: q and k first; packed ones have a batch of one.
        needed: which of them need a gradient.
        gradients: of the function's results, [B, H_q, T_q, ...]; None = zero.
    """
    unread: dict[str, Any] = dict.fromkeys(LEARNED)
    options = options._replace(**unread)

    def compute(part: Part, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return of_part(part)(*tensors)

    lies = tuple(map(_lies, names, inputs))
    function = _Function(compute, options, lies, ("q",) * len(gradients))
    return function.gradients(inputs, needed, gradients)


def _lies(name: str, x: Tensor | None) -> str:
    if name == "attn_bias":
        return "q" if x is not None and x.shape[2] != 1 else ""
    return {"q": "q", "k": "k", "v": "k", **LAID_AS}.get(name, "")


class _Function(NamedTuple):
    """A function of tensors that is a sum over parts of a call.

    compute: results for a part and the tensors' slices.
    options: of the call.
    inputs: for each tensor "q" or "k" if its dim 2 are queries or keys, else "".
    results: likewise.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    options: Options
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    def gradients(
        self,
        inputs: Sequence[Tensor | None],
        needed: Sequence[bool],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Needed gradients of inputs, differentiable if autograd records."""
        if not in_parts((*inputs, *gradients)):
            whole = Part(0, 0, slice(None), slice(None), self.options)
            recorded = torch.is_grad_enabled()
            with torch.enable_grad():  # views made without grad have no graph
                function = partial(self.compute, whole)
                return gradients_with_graph(function, inputs, needed, gradients, recorded)
        of = self._gradient(needed)
        like = [i for i, need in enumerate(needed) if need]
        results = iter(_Parts.apply(of, like, *inputs, *gradients))  # type: ignore[no-untyped-call]
        return [next(results) if need else None for need in needed]

    def _gradient(self, needed: Sequence[bool]) -> "_Function":
        """The gradient of needed inputs, as a function of inputs and the results' gradients."""
        count = len(self.inputs)

        def compute(part: Part, *tensors: Tensor | None) -> tuple[Tensor, ...]:
            inputs, of_results = tensors[:count], tensors[count:]
            function = partial(self.compute, part)
            grads = gradients_with_graph(function, inputs, needed, of_results)
            return tuple(
                torch.zeros_like(x) if dx is None else dx
                for x, dx, need in zip(inputs, grads, needed, strict=True)
                if need and x is not None
            )

        results = tuple(lie for lie, need in zip(self.inputs, needed, strict=True) if need)
        return self._replace(compute=compute, inputs=self.inputs + self.results, results=results)


def in_parts(tensors: Sequence[Tensor | None]) -> bool:
    """Whether `_Parts` and kernels support them: no transform, trace, tangent or legacy vmap."""
    if torch.compiler.is_compiling() or tracing.transforming():
        return False
    present = [x for x in tensors if x is not None]
    dual = tracing.in_forward_mode() and any(map(tracing.has_tangent, present))
    return not dual and not any(map(is_legacy_batchedtensor, present))


class _Parts(torch.autograd.Function):
    """Autograd of a `_Function`, at any order; `like`: index of each result's shape."""

    @staticmethod
    def forward(
        ctx: Any, function: _Function, like: Sequence[int], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        q, k, *_ = tensors
        assert q is not None and k is not None
        results: list[Any] = [tensors[name] for name in like]
        sums = [torch.zeros_like(formula.wide(x, None)) for x in results]
        casts = tracing.autocasting(q.device)
        wide = torch.autocast(q.device.type, enabled=False) if casts else nullcontext()
        for part in parts(q, k, function.options, _SCORES):
            leaves = [_leaf(x, lie, part) for x, lie in zip(tensors, function.inputs, strict=True)]
            with torch.enable_grad(), wide:
                grads = function.compute(part, *leaves)
            for total, lie, x in zip(sums, function.results, grads, strict=True):
                _of_part(total, lie, part).add_(x.detach())
        return tuple(total.to(x.dtype) for total, x in zip(sums, results, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *ctx.function.gradients(ctx.saved_tensors, needed, gradients)


def _of_part(x: Tensor, lie: str, part: Part) -> Tensor:
    return x[:, :, part.rows if lie == "q" else part.keys] if lie else x


def _leaf(x: Tensor | None, lie: str, part: Part) -> Tensor | None:
    """A slice of x in fp32 or wider, for accurate sums over parts."""
    if x is None:
        return None
    return formula.wide(_of_part(x, lie, part), None).detach().requires_grad_()
