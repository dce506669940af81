"""Attention under `torch.func`: grad, vmap and their compositions.

torch.func cannot differentiate an op with its own gradients, as torch's autograd function for it
does not support transforms. These functions do. Gradients and tangents come from the kernels, of
one another too (Hessian-vector products), but the backward of gradients inside a transform from
torch's formula; otherwise `torch.func.grad`, which always requires differentiable gradients, would
never use the kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import tracing
from ...options import Options
from ...torch_backend.derivatives import carried, gradients_by_formula
from ...tracing import transforming as transforming
from ..gradients import (
    NAMES,
    Kernels,
    formula_of,
    kernel_gradients,
    needed_of,
    placed,
    save,
    saved,
)
from ..schema import PLACES, flat, unflat
from .second_order import (
    MOVED,
    Dims,
    attention_tangent,
    gradients_by_kernels,
    gradients_of_pushed,
    keep,
    kept,
    mapped,
    primal_of,
    unless_zero,
    why_no_second,
)


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
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def jvp(ctx: Any, *moves: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tangents of an outer transform: those of an inner one are taken apart in `dual`."""
        *tensors, options = saved(ctx)
        tq, tk, tv, *tfields = map(unless_zero, moves[1:])
        of_learned = [tfields[PLACES[name]] for name in MOVED]
        q, k, v, o, lse, *fields = map(primal_of, (*tensors, *flat(options)))
        pushes: tuple[Tensor, Tensor] = _Tangent.apply(  # type: ignore[no-untyped-call]
            ctx.kernels, q, k, v, o, lse, tq, tk, tv, *of_learned, *fields
        )
        return pushes

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        grads = gradients_by_kernels(ctx.kernels, saved(ctx), needed_of(needs), do, dlse)
        return (None, *placed(grads, len(needs)))

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        return mapped(_Attention.apply, 1, info.batch_size, in_dims, arguments)


def why_no_tangents(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason that kernels cannot compute the tangents of a call, or None."""
    name = carried(q, k, v, options)
    if name is None:
        return None
    if torch.compiler.is_compiling():
        return f"{name} has a tangent, which kernels do not compute under torch.compile"
    if name == "mod_tensors":
        return "mod_tensors have a tangent, which has no kernel"
    for second in ("relative_keys", "key2"):
        if getattr(options, second) is not None:
            return f"{name} has a tangent, and {second} has no kernel for that"
    levels = levels_of_tangents(q, k, v, options)
    if len(levels) > 1:
        return f"{name} has tangents of several transforms, and kernels compute those of one"
    if 0 not in levels and options.score_mod is not None:
        return f"{name} has a tangent of an outer transform, and score_mod has no kernel for that"
    return None


def levels_of_tangents(q: Tensor, k: Tensor, v: Tensor, options: Options) -> set[int]:
    """Indices of the transforms at which an input has a tangent; the innermost is 0."""
    inputs = (q, k, v, *options.differentiable)
    return {level for x in inputs if x is not None for level in tracing.tangent_levels(x)}


def dual(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o and lse with tangents, by the kernels' operators, if `why_no_tangents` is None."""
    tensors = [q, k, v, *(getattr(options, name) for name in MOVED)]
    primals, moves = zip(*map(_taken_apart, tensors), strict=True)
    q, k, v, *learned = primals
    options = options._replace(**dict(zip(MOVED, learned, strict=True)))
    o, lse, to, tlse = _Dual.apply(kernels, q, k, v, *moves, *flat(options))  # type: ignore[no-untyped-call]
    make_dual: Any = forward_ad.make_dual
    return make_dual(o, to), make_dual(lse, tlse)


def _taken_apart(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if x is None:
        return None, None
    primal, move = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return primal, unless_zero(move)


class _Dual(torch.autograd.Function):
    """o, lse and their tangents, as a function of inputs and their tangents."""

    @staticmethod
    def forward(
        kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        options = unflat(rest[3 + len(MOVED) :])
        o, lse = kernels.forward(q, k, v, options)
        tq, tk, tv, tbias, trelative, tsinks = rest[: 3 + len(MOVED)]
        return (
            o,
            lse,
            *attention_tangent.by_op(
                q, k, v, tq, tk, tv, tbias, trelative, tsinks, o, lse, options
            ),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        o, lse, to, tlse, kernels, q, k, v, *rest = kept(ctx)
        needs = ctx.needs_input_grad[1:]
        tensors, pushes = (q, k, v, o, lse), (to, tlse)
        return (None, *_dual_gradients(kernels, tensors, rest, pushes, needs, grads))

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        return mapped(_Dual.apply, 1, info.batch_size, in_dims, arguments)


class _Tangent(torch.autograd.Function):
    """Tangents of o and lse, next to their `_Attention`."""

    @staticmethod
    def forward(
        kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        tq, tk, tv, tbias, trelative, tsinks, *fields = rest
        return attention_tangent.by_op(
            q, k, v, tq, tk, tv, tbias, trelative, tsinks, o, lse, unflat(fields)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, dto: Tensor | None, dtlse: Tensor | None) -> tuple[Tensor | None, ...]:
        to, tlse, kernels, q, k, v, o, lse, *rest = kept(ctx)
        needs = ctx.needs_input_grad
        needs, grads = (*needs[1:4], *needs[6:]), (None, None, dto, dtlse)
        of = _dual_gradients(kernels, (q, k, v, o, lse), rest, (to, tlse), needs, grads)
        return (None, *of[:3], None, None, *of[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        return mapped(_Tangent.apply, 1, info.batch_size, in_dims, arguments)


def _dual_gradients(
    kernels: Kernels,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    rest: Sequence[Any],
    pushes: tuple[Tensor, Tensor],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and `rest`, by the kernels, or by the formula if `why_no_second`.

    tensors: q, k, v, o and lse. rest: tangents of q, k, v and the fields in MOVED, and fields.
    pushes: tangents of o and lse. needs: of q, k, v and rest. grads: of o, lse and pushes.
    """
    count = 3 + len(MOVED)
    moves, options = rest[:count], unflat(tuple(rest[count:]))
    inputs = (*tensors, options)
    needed = needed_of((*needs[:3], *needs[3 + count :]))
    of_moves: list[Tensor | None] = [None] * count
    do, dlse, dto, dtlse = grads
    if dto is None and dtlse is None:
        of_inputs = gradients_by_kernels(kernels, inputs, needed, do, dlse)
    elif why_no_second(options, needed, *tensors, *grads, *moves) is None:
        of_inputs = gradients_of_pushed(grads, inputs, moves, pushes, needed)
        wanted = dict(zip(("q", "k", "v", *MOVED), needs[3:], strict=False))
        if any(wanted.values()):
            places = [wanted.get(name, False) for name in NAMES]
            of = dict(
                zip(NAMES, kernel_gradients(kernels, inputs, places, dto, dtlse), strict=True)
            )
            of_moves = [of[name] if need else None for name, need in wanted.items()]
    else:
        all_tensors = [*tensors[:3], *options.differentiable, *moves]
        needed += needs[3 : 3 + count]
        of_all = gradients_by_formula(_pushed(options), all_tensors, needed, grads)
        of_inputs, of_moves = of_all[:-count], of_all[-count:]
    of_call = placed(of_inputs, len(needs) - count)
    return (*of_call[:3], *of_moves, *of_call[3:])


def _pushed(options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """`_Dual` as a torch formula of q, k, v, the fields in LEARNED, and tangents."""
    function = formula_of(options)

    def pushed(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        by_name = dict(zip(NAMES, inputs, strict=False))
        moves = dict(zip(("q", "k", "v", *MOVED), inputs[len(NAMES) :], strict=True))
        moves = {name: x for name, x in moves.items() if x is not None}

        def of_moved(*moved: Tensor) -> tuple[Tensor, Tensor]:
            return function(*(by_name | dict(zip(moves, moved, strict=True))).values())

        primals = tuple(by_name[name] for name in moves)
        # three with has_aux alone
        outputs, pushes = torch.func.jvp(of_moved, primals, tuple(moves.values()))  # type: ignore[misc]
        return *outputs, *pushes

    return pushed
