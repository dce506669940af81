"""Derivatives of calls: tangents, and gradients as a differentiable formula, whole or in parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tracing
from ..options import LEARNED, Options


def carried(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Name of the first of mod_tensors, q, k, v and the learned options with a tangent, or None."""
    if not tracing.in_forward_mode():
        return None
    named = [
        *(("mod_tensors", x) for x in options.mod_tensors),
        *zip(("q", "k", "v", *LEARNED), (q, k, v, *options.differentiable), strict=True),
    ]
    return next((name for name, x in named if x is not None and tracing.has_tangent(x)), None)


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

    def alone(x: Tensor) -> Tensor:
        # If an input depends on another, its contribution would be counted here and again in the
        # outer graph. Compiled autograd loses the gradients of views of what it saved.
        if create_graph or not torch.compiler.is_compiling():
            return x.view_as(x)
        return x.detach().requires_grad_(x.requires_grad)

    seen = [None if x is None else alone(x) for x in inputs]
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


class InParts(NamedTuple):
    """A call that is computed part by part, and again for gradients.

    parts: slices of rows, and functions that compute their results from the tensors' rows.
    of_tensors, of_results: dim of the rows in each tensor and result. None: every part has the
    whole tensor; the result is the sum of the parts'.
    """

    parts: Sequence[tuple[slice, Callable[..., tuple[Tensor, ...]]]]
    of_tensors: Sequence[int | None]
    of_results: Sequence[int | None]

    @property
    def last_first(self) -> Iterator[tuple[slice, Callable[..., tuple[Tensor, ...]]]]:
        """The parts in order of computation: a causal call's last takes the most memory."""
        return reversed(self.parts)  # blocks that grow would each be allocated anew

    def at_once(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """All results, recorded if autograd records."""
        parts = (
            compute(*own_rows(rows, tensors, self.of_tensors)) for rows, compute in self.last_first
        )
        return tuple(joined(parts, self.of_results))  # type: ignore[arg-type]

    def recomputed(
        self, *tensors: Tensor | None, at_once: Callable[..., tuple[Tensor, ...]] | None = None
    ) -> tuple[Tensor, ...]:
        """All results, by `at_once`; gradients of any order compute each part again."""
        compute = self.at_once if at_once is None else at_once
        results: tuple[Tensor, ...] = _Recomputed.apply(self, compute, *tensors)  # type: ignore[no-untyped-call]
        return results


def own_rows(
    rows: slice, tensors: Iterable[Tensor | None], dims: Sequence[int | None]
) -> list[Tensor | None]:
    """Rows of tensors."""
    first, count = rows.start, rows.stop - rows.start  # a slice in a closure is traced as constant
    return [
        x if x is None or dim is None else x.narrow(dim, first, count)
        for x, dim in zip(tensors, dims, strict=True)
    ]


def joined(
    parts: Iterable[Sequence[Tensor | None]], dims: Sequence[int | None]
) -> list[Tensor | None]:
    """Tensors of all rows from those of each part, last first; sums are in fp32 or wider."""
    found: list[list[Tensor]] = [[] for _ in dims]
    for part in parts:
        for of, x, dim in zip(found, part, dims, strict=True):
            if x is not None and dim is not None:
                of.append(x)
            elif x is not None and not of:
                of.append(x.to(torch.promote_types(x.dtype, torch.float32), copy=True))
            elif x is not None:  # in place, so that no part's stays in memory
                of[0] = of[0] + x if torch.is_grad_enabled() else of[0].add_(x)
    pairs = zip(found, dims, strict=True)
    return [
        None if not of else of[0] if dim is None else torch.cat(of[::-1], dim) for of, dim in pairs
    ]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: InParts, compute: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        results = compute(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.save_for_backward(*tensors)
        ctx.call = call
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: InParts = ctx.call
        needed = ctx.needs_input_grad[2:]
        tensors = ctx.saved_tensors  # once, as checkpoints demand

        def gradients(rows: slice, compute: Callable[..., Any]) -> list[Tensor | None]:
            inputs = own_rows(rows, tensors, call.of_tensors)
            own = own_rows(rows, grads, call.of_results)
            return gradients_by_formula(compute, inputs, needed, own)

        summed = joined((gradients(*part) for part in call.last_first), call.of_tensors)
        pairs = zip(summed, tensors, strict=True)
        return None, None, *(dx if dx is None else dx.to(x.dtype) for dx, x in pairs)
