"""Attention under `torch.func`: grad, vmap and their compositions.

torch.func cannot differentiate an op with its own gradients, as torch's autograd function for it
does not support transforms. These functions do. Gradients come from the kernels, and double
backward from torch's formula; otherwise `torch.func.grad`, which always requires differentiable
gradients, would never use the kernels.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

import fastattn.kernels as launchers

from .. import tracing
from ..options import LEARNED, Options
from ..torch_backend import tangents
from ..torch_backend.double_backward import gradients_in_parts, gradients_with_graph
from ..torch_backend.query_chunks import Part
from ..tracing import transforming as transforming
from .call import operator
from .flops import attended
from .gradients import (
    NAMES,
    Kernels,
    differentiable_gradients,
    formula_of,
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
    """o and lse, by the kernels' operators."""
    output: tuple[Tensor, Tensor] = _Attention.apply(kernels, q, k, v, *flat(options))  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *fields: object
    ) -> tuple[Tensor, Tensor]:
        return kernels.forward(q, k, v, unflat(fields))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernels, q, k, v, *fields = inputs
        save(ctx, q, k, v, unflat(fields), output)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, options = saved(ctx)
        if do is None:
            do = torch.zeros_like(tensors[3])
        needs = ctx.needs_input_grad[1:]
        needed = needed_of(needs)
        grads = iter(
            _Gradients.apply(ctx.kernels, tuple(needed), do, dlse, *tensors, *flat(options))  # type: ignore[no-untyped-call]
        )
        return (None, *placed([next(grads) if need else None for need in needed], len(needs)))

    @staticmethod
    def vmap(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], _Dims]:
        return _mapped(_Attention.apply, 1, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """The needed gradients of q, k, v and the fields in LEARNED."""

    @staticmethod
    def forward(
        kernels: Kernels, needed: tuple[bool, ...], do: Tensor, dlse: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        q, k, v, o, lse, *fields = arguments
        inputs = (q, k, v, o, lse, unflat(fields))
        grads = kernel_gradients(kernels, inputs, needed, do, dlse)
        return tuple(x for x, need in zip(grads, needed, strict=True) if need and x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.needed, do, dlse, q, k, v, _, _, *fields = inputs
        ctx.has_dlse = dlse is not None
        save(ctx, q, k, v, unflat(fields), (do, do if dlse is None else dlse))

    @staticmethod
    def backward(ctx: Any, *dgrads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the formula, which does not use o and lse, so they get no gradient."""
        q, k, v, do, dlse, options = saved(ctx)
        fields = [getattr(options, name) for name in LEARNED]
        inputs = [do, dlse if ctx.has_dlse else None, q, k, v, *fields]

        def function(do: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
            q, k, v, *fields = rest
            call_options = replaced(options, fields)
            grads = differentiable_gradients(q, k, v, call_options, ctx.needed, do, dlse)
            return tuple(x for x in grads if x is not None)

        needed = [x is not None and x.requires_grad for x in inputs]
        of = gradients_with_graph(function, inputs, needed, dgrads)
        needs = ctx.needs_input_grad
        # Arguments: kernels, needed, do, dlse, then the op's arguments with o and lse.
        rest = placed(of[2:], len(needs) - 6)
        return (None, None, *of[:2], *rest[:3], None, None, *rest[3:])

    @staticmethod
    def vmap(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], _Dims]:
        return _mapped(_Gradients.apply, 2, info.batch_size, in_dims, arguments)


# Options with tangents in the kernel.
_MOVED = ("attn_bias", "relative_bias", "sinks")


@operator(attended(3, 2))
def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor,
    tq: Tensor | None, tk: Tensor | None, tv: Tensor | None,
    tbias: Tensor | None, trelative: Tensor | None, tsinks: Tensor | None,
    o: Tensor, lse: Tensor, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangents of o and lse; see `kernels.forward_mode.tangent.launch_tangent`."""
    tangents = launchers.tangent.InputTangents(tq, tk, tv, tbias, trelative, tsinks)
    return launchers.tangent.launch_tangent(q, k, v, tangents, o, lse, options)


@attention_tangent.op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = arguments[9:11]
    return torch.empty_like(o), torch.empty_like(lse)


def why_no_tangents(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason that kernels cannot compute the tangents of a call, or None."""
    name = tangents.carried(q, k, v, options)
    if name is None:
        return None
    if torch.compiler.is_compiling():
        return f"{name} has a tangent, which kernels do not carry where torch.compile traces"
    for second in ("relative_keys", "key2"):
        if getattr(options, second) is not None:
            return f"{name} has a tangent, and {second} has no kernel for that"
    inputs = (q, k, v, *options.differentiable)
    if any(set(tracing.tangent_levels(x)) - {0} for x in inputs if x is not None):
        return f"{name} has a tangent of an outer transform, and kernels know the innermost alone"
    return None


def dual(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o and lse with tangents, by the kernels' operators, if `why_no_tangents` is None."""
    tensors = [q, k, v, *(getattr(options, name) for name in _MOVED)]
    primals, moves = zip(*map(_taken_apart, tensors), strict=True)
    q, k, v, *learned = primals
    options = options._replace(**dict(zip(_MOVED, learned, strict=True)))
    o, lse, to, tlse = _Dual.apply(kernels, q, k, v, *moves, *flat(options))  # type: ignore[no-untyped-call]
    make_dual: Any = forward_ad.make_dual
    return make_dual(o, to), make_dual(lse, tlse)


def _taken_apart(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if x is None:
        return None, None
    primal, move = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return primal, None if move is None or move._is_zerotensor() else move


class _Dual(torch.autograd.Function):
    """o, lse and their tangents, as a function of inputs and their tangents."""

    @staticmethod
    def forward(
        kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        options = unflat(rest[3 + len(_MOVED) :])
        o, lse = kernels.forward(q, k, v, options)
        tq, tk, tv, tbias, trelative, tsinks = rest[: 3 + len(_MOVED)]
        return (
            o,
            lse,
            *attention_tangent.by_op(
                q, k, v, tq, tk, tv, tbias, trelative, tsinks, o, lse, options
            ),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.kernels, *arguments = inputs
        ctx.rest = [None if isinstance(x, Tensor) else x for x in arguments]
        tensors = [x if isinstance(x, Tensor) else None for x in arguments]
        ctx.save_for_backward(*output[:2], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Use the kernels if nothing depends on the tangents, else the formula's tangents."""
        o, lse, *tensors = ctx.saved_tensors
        q, k, v, *rest = (x if x is not None else y for x, y in zip(tensors, ctx.rest, strict=True))
        count = 3 + len(_MOVED)
        moves, options = rest[:count], unflat(tuple(rest[count:]))
        needs = ctx.needs_input_grad[1:]
        needed = needed_of((*needs[:3], *needs[3 + count :]))
        do, dlse, dto, dtlse = grads
        of_moves: list[Tensor | None] = [None] * count
        if dto is None and dtlse is None:
            do = torch.zeros_like(o) if do is None else do
            call = (tuple(needed), do, dlse, q, k, v, o, lse, *flat(options))
            results = iter(_Gradients.apply(ctx.kernels, *call))  # type: ignore[no-untyped-call]
            of_inputs = [next(results) if need else None for need in needed]
        else:
            inputs = [q, k, v, *options.differentiable, *moves]
            names = (*NAMES, "q", "k", "v", *_MOVED)
            needed += needs[3 : 3 + count]
            of = gradients_in_parts(_pushed, options, names, inputs, needed, grads)
            of_inputs, of_moves = of[:-count], of[-count:]
        of_call = placed(of_inputs, len(needs) - count)
        return (None, *of_call[:3], *of_moves, *of_call[3:])

    @staticmethod
    def vmap(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], _Dims]:
        return _mapped(_Dual.apply, 1, info.batch_size, in_dims, arguments)


def _pushed(part: Part) -> Callable[..., tuple[Tensor, ...]]:
    """`_Dual` as a torch formula of q, k, v, the fields in LEARNED, and tangents."""
    function = formula_of(part)

    def pushed(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        by_name = dict(zip(NAMES, inputs, strict=False))
        moves = dict(zip(("q", "k", "v", *_MOVED), inputs[len(NAMES) :], strict=True))
        moves = {name: x for name, x in moves.items() if x is not None}

        def of_moved(*moved: Tensor) -> tuple[Tensor, Tensor]:
            return function(*(by_name | dict(zip(moves, moved, strict=True))).values())

        primals = tuple(by_name[name] for name in moves)
        # three with has_aux alone
        outputs, pushes = torch.func.jvp(of_moved, primals, tuple(moves.values()))  # type: ignore[misc]
        return *outputs, *pushes

    return pushed


def _mapped(
    function: Callable[..., Any], first: int, size: int, in_dims: _Dims, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], _Dims]:
    """One call for all if only q, k, v and tensors with their rows are mapped, else one call each.

    Users' functions also need one call each, as they see batch indices.
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
    """Fold [B, ...] of each of `size` calls to [size * B, ...].

    Contiguous, as kernels need for lse, also if expanded.
    """
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1).contiguous()
