"""Attention under `torch.func`: grad, vmap, and what is composed of them.

An op with gradients of its own cannot be differentiated there, because the autograd function that
torch makes of it knows no transforms. These two know them. The gradients' gradients come from the
formula, and the gradients themselves from the kernels, which `torch.func.grad` would otherwise not
get to, since it always asks for gradients that can be differentiated again.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..options import LEARNED, Options
from ..torch_backend.double_backward import gradients_with_graph
from ..tracing import transforming as transforming
from .gradients import (
    Kernels,
    differentiable_gradients,
    kernel_gradients,
    needed_of,
    placed,
    replaced,
    save,
    saved,
)
from .schema import flat, unflat

_Dims: TypeAlias = tuple[int | None, ...]


def attend(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o and lse, by kernels that are operators."""
    output: tuple[Tensor, Tensor] = _Attention.apply(kernels, q, k, v, *flat(options))  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *fields: Any
    ) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = kernels.forward(q, k, v, unflat(fields))
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernels, q, k, v, *fields = inputs
        save(ctx, q, k, v, unflat(tuple(fields)), output)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, options = saved(ctx)
        if do is None:
            do = torch.zeros_like(tensors[3])
        needs = ctx.needs_input_grad[1:]
        needed = needed_of(needs)
        found = iter(
            _Gradients.apply(ctx.kernels, tuple(needed), do, dlse, *tensors, *flat(options))  # type: ignore[no-untyped-call]
        )
        return (None, *placed([next(found) if need else None for need in needed], len(needs)))

    @staticmethod
    def vmap(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], _Dims]:
        return _mapped(_Attention.apply, 1, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """The gradients that are needed, of q, k, v and the fields in LEARNED."""

    @staticmethod
    def forward(
        kernels: Kernels,
        needed: tuple[bool, ...],
        do: Tensor,
        dlse: Tensor | None,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        q, k, v, o, lse, *fields = arguments
        inputs = (q, k, v, o, lse, unflat(tuple(fields)))
        found = kernel_gradients(kernels, inputs, needed, do, dlse)
        return tuple(x for x, need in zip(found, needed, strict=True) if need and x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.needed, do, dlse, q, k, v, _, _, *fields = inputs
        ctx.has_dlse = dlse is not None
        save(ctx, q, k, v, unflat(tuple(fields)), (do, do if dlse is None else dlse))

    @staticmethod
    def backward(ctx: Any, *dgrads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the formula, which does not read o and lse: they get no gradient."""
        q, k, v, do, dlse, options = saved(ctx)
        fields = [getattr(options, name) for name in LEARNED]
        inputs = [do, dlse if ctx.has_dlse else None, q, k, v, *fields]

        def function(do: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
            q, k, v, *fields = rest
            given = replaced(options, fields)
            found = differentiable_gradients(q, k, v, given, ctx.needed, do, dlse)
            return tuple(x for x in found if x is not None)

        needed = [x is not None and x.requires_grad for x in inputs]
        of = gradients_with_graph(function, inputs, needed, dgrads)
        needs = ctx.needs_input_grad
        # kernels, needed, do, dlse before the arguments of the op, and o and lse among them.
        rest = placed(of[2:], len(needs) - 6)
        return (None, None, *of[:2], *rest[:3], None, None, *rest[3:])

    @staticmethod
    def vmap(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], _Dims]:
        return _mapped(_Gradients.apply, 2, info.batch_size, in_dims, arguments)


def _mapped(
    function: Callable[..., Any], first: int, size: int, in_dims: _Dims, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], _Dims]:
    """One call for all where only q, k, v and what has their rows are tensors, else one each.

    One each, too, where there are users' functions: they count the rows of a call.
    """
    tensors, fields = arguments[first:], arguments[-len(flat(Options())) :]
    if any(isinstance(x, Tensor) or (isinstance(x, str) and x) for x in fields):
        parts = [
            function(
                *arguments[:first],
                *(
                    x if dim is None else x.select(dim, i)
                    for x, dim in zip(tensors, in_dims[first:], strict=True)
                ),
            )
            for i in range(size)
        ]
        outputs = tuple(torch.stack(rows) for rows in zip(*parts, strict=True))
    else:
        rows = [
            x if not isinstance(x, Tensor) else _moved(x, dim, size)
            for x, dim in zip(tensors, in_dims[first:], strict=True)
        ]
        outputs = tuple(x.unflatten(0, (size, -1)) for x in function(*arguments[:first], *rows))
    return outputs, (0,) * len(outputs)


def _moved(x: Tensor, dim: int | None, size: int) -> Tensor:
    """[B, ...] of each of `size` calls as [size * B, ...].

    Contiguous, as kernels read lse: what is expanded over calls of one row each would not be.
    """
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1).contiguous()
