"""Second derivatives of attention: tangents, their backward, and the backward of gradients.

A double backward is a backward of tangents. With tangents equal to the gradients of dq, dk, dv,
the gradient of do is the tangent of o, and the others are gradients of do . to (Pearlmutter 1994,
doi 10.1162/neco.1994.6.1.147). Kernels compute them, or torch's formula if `why_no_second`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import kernels as launchers
from ... import tracing
from ...options import FUNCTIONS, LEARNED, Options
from ...torch_backend import formula
from ...torch_backend.derivatives import gradients_by_formula
from ..call import fake_in_layout, operator
from ..flops import attended
from ..gradients import (
    NAMES,
    Kernels,
    Saved,
    as_batch,
    as_packed,
    as_read,
    differentiable_gradients,
    kernel_gradients,
    needed_of,
    placed,
    replaced,
)
from ..schema import PLACES, flat, unflat

Dims: TypeAlias = tuple[int | None, ...]
# Options with tangents in the kernels.
MOVED = ("attn_bias", "relative_bias", "sinks")


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


@operator(attended(7, 5))
def attention_tangent_backward(
    do: Tensor | None, dlse: Tensor | None, dto: Tensor, dtlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor,
    tq: Tensor | None, tk: Tensor | None, tv: Tensor | None,
    tbias: Tensor | None, trelative: Tensor | None,
    o: Tensor, lse: Tensor, to: Tensor, tlse: Tensor, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, delta and eta of o, lse and their tangents; see `kernels.tangent_backward`."""
    tangents = launchers.tangent.InputTangents(tq, tk, tv, tbias, trelative, None)
    launch = launchers.tangent_backward.launch_tangent_backward
    return launch(do, dlse, dto, dtlse, q, k, v, tangents, o, lse, to, tlse, options)


@attention_tangent_backward.op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = arguments[4:7]
    lse, fields = arguments[13], arguments[16:]
    wide = unflat(fields).fp32_results
    dq, dk, dv = (fake_in_layout(x, *x.shape[1:], fp32=wide) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(lse), torch.empty_like(lse)


def why_no_second(options: Options, wanted: Sequence[bool], *tensors: Tensor | None) -> str | None:
    """Reason that kernels cannot compute the second derivatives of a call, or None.

    wanted: which of q, k, v and the fields in LEARNED need one. tensors: of the call.
    """
    if torch.is_grad_enabled():
        return "third derivatives have no kernel"
    if (reason := _why_no_kernel(options, wanted)) is not None:
        return reason
    if not tracing.untransformed(tensors):
        return "torch traces, maps or transforms the backward"
    return None


def _why_no_kernel(options: Options, wanted: Sequence[bool]) -> str | None:
    """Reason that `gradients_of_pushed` cannot serve a call, or None."""
    for name in ("relative_keys", "key2", "score_mod"):
        if getattr(options, name) is not None:
            return f"{name} has no kernel for second derivatives"
    for name in ("attn_bias", "relative_bias"):
        if wanted[NAMES.index(name)]:
            return f"{name} needs a gradient, which has no kernel for second derivatives"
    if options.fp32_results:
        return "results in float32 have no kernel for second derivatives"
    return None


def pushed(inputs: Saved, moves: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Tangents of o and lse, by the kernel. moves: of q, k, v and the fields in MOVED."""
    q, k, v, o, lse, options = inputs
    tq, tk, tv, tbias, trelative, tsinks = moves
    return attention_tangent(q, k, v, tq, tk, tv, tbias, trelative, tsinks, o, lse, options)


def gradients_of_pushed(
    grads: Sequence[Tensor | None],
    inputs: Saved,
    moves: Sequence[Tensor | None],
    pushes: tuple[Tensor, Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of q, k, v and the fields in LEARNED, by kernels, if not `why_no_second`.

    Args:
        grads: of o, lse and their tangents; None: zero.
        inputs: of the call.
        moves: tangents of q, k, v and the fields in MOVED; None: zero.
        pushes: the tangents of o and lse.
        wanted: which are needed.
    """
    if not any(wanted):
        return [None] * len(wanted)
    q, k, v, o, lse, options = inputs
    do, dlse, dto, dtlse = grads
    dto, dtlse = as_read(dto, dtlse, o)
    dlse = None if dlse is None else dlse.contiguous()
    tq, tk, tv, tbias, trelative, _ = moves
    *of_qkv, delta, eta = attention_tangent_backward(
        do, dlse, dto, dtlse, q, k, v, tq, tk, tv, tbias, trelative, o, lse, *pushes, options
    )
    of: dict[str, Tensor] = dict(zip(NAMES, of_qkv, strict=False))
    if options.sinks is not None:
        # A sink is one more key with value 0.
        moved = moves[-1]
        c = (0 if moved is None else moved.float()[:, None]) - pushes[1]
        total = formula.weighed_by_column(options.sinks, lse, eta + c * delta)
        of["sinks"] = -total.to(options.sinks.dtype)
    return [of[name] if need else None for name, need in zip(NAMES, wanted, strict=True)]


def gradients(
    kernels: Kernels, inputs: Saved, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """Compute the gradients of q, k, v and the fields in LEARNED; None where not needed.

    Packed sequences may or may not have a batch dim, as at launch.
    """
    q, k, v, o, lse, options = inputs
    packed = q.dim() == 3
    if packed:
        q, k, v, o, lse = as_batch(q), as_batch(k), as_batch(v), as_batch(o), lse[None]
        do = None if do is None else as_batch(do)
        dlse = None if dlse is None else dlse[None]
    inputs = (q, k, v, o, lse, options)
    if not torch.is_grad_enabled():
        grads = kernel_gradients(kernels, inputs, needed, do, dlse)
    elif tracing.may_be_traced(q) or not tracing.untransformed((*inputs[:5], do, dlse)):
        grads = differentiable_gradients(q, k, v, options, needed, do, dlse)
    else:
        grads = gradients_by_kernels(kernels, inputs, needed, do, dlse)
    if packed:
        grads[:3] = [None if x is None else as_packed(x) for x in grads[:3]]
    return grads


def gradients_by_kernels(
    kernels: Kernels, inputs: Saved, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """`kernel_gradients`, differentiable."""
    *tensors, options = inputs
    do = torch.zeros_like(inputs[3]) if do is None else do
    functions: dict[str, Any] = {}
    if not tracing.transforming():  # which looks for functions among the arguments
        functions = {name: getattr(options, name) for name in FUNCTIONS}
    without: dict[str, Any] = dict.fromkeys(functions)
    fields = flat(options._replace(**without))
    arguments = (kernels, tuple(needed), functions, do, dlse, *tensors, *fields)
    grads = iter(_Gradients.apply(*arguments))  # type: ignore[no-untyped-call]
    return [next(grads) if need else None for need in needed]


class _Gradients(torch.autograd.Function):
    """The needed gradients of q, k, v and the fields in LEARNED.

    functions: options in FUNCTIONS, as a local one has no name to be an argument by.
    """

    @staticmethod
    def forward(
        kernels: Kernels, needed: tuple[bool, ...], functions: dict[str, Any],
        do: Tensor, dlse: Tensor | None, *arguments: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, k, v, o, lse, *fields = arguments
        inputs = (q, k, v, o, lse, unflat(fields)._replace(**functions))
        grads = kernel_gradients(kernels, inputs, needed, do, dlse)
        return tuple(x for x, need in zip(grads, needed, strict=True) if need and x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, inputs)
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def jvp(ctx: Any, *moves: Tensor | None) -> tuple[Tensor, ...]:
        """Tangents, of a transform that is outside of the one that differentiates."""
        _, needed, functions, *rest = kept(ctx)
        do, dlse, q, k, v, o, lse, *fields = map(primal_of, rest)
        tdo, tdlse, tq, tk, tv, to, tlse, *tfields = map(unless_zero, moves[3:])
        options = unflat(fields)._replace(**functions)
        if _why_no_kernel(options, needed) is not None:
            primals = (do, dlse, q, k, v, *options.differentiable)
            of_learned = (tfields[PLACES[name]] for name in LEARNED)
            tangents = (tdo, tdlse, tq, tk, tv, *of_learned)
            return _tangents_by_formula(options, needed, primals, tangents)
        of_moved = (tfields[PLACES[name]] for name in MOVED)
        grads, tangents = (tdo, tdlse, do, dlse), (tq, tk, tv, *of_moved)
        arguments = (needed, functions, *grads, q, k, v, o, lse, *tangents, to, tlse, *fields)
        results: tuple[Tensor, ...] = _TangentOfGradients.apply(*arguments)  # type: ignore[no-untyped-call]
        return results

    @staticmethod
    def backward(ctx: Any, *dgrads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, needed, functions, do, dlse, q, k, v, o, lse, *fields = kept(ctx)
        inputs = (q, k, v, o, lse, unflat(fields)._replace(**functions))
        needs = ctx.needs_input_grad
        wanted = needed_of((*needs[5:8], *needs[10:]))
        dgrads = tuple(map(unless_zero, dgrads))
        present = iter(dgrads)
        moves = {x: next(present) if need else None for x, need in zip(NAMES, needed, strict=True)}
        if all(x is None for x in dgrads):
            return (None,) * len(needs)
        if why_no_second(inputs[5], wanted, *inputs[:5], do, dlse, *dgrads) is None:
            tangents = [moves[name] for name in ("q", "k", "v", *MOVED)]
            pushes = pushed(inputs, tangents)
            grads = (None, None, do, dlse)
            of = [*pushes, *gradients_of_pushed(grads, inputs, tangents, pushes, wanted)]
        else:
            of = _by_formula((do, dlse), inputs, needed, dgrads)
        # Results of the formula do not use o and lse, so they get no gradient.
        rest = placed(of[2:], len(needs) - 7)
        of_do = [x if need else None for x, need in zip(of[:2], needs[3:5], strict=True)]
        return (None, None, None, *of_do, *rest[:3], None, None, *rest[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        return mapped(_Gradients.apply, 3, info.batch_size, in_dims, arguments)


class _TangentOfGradients(torch.autograd.Function):
    """Tangents of the needed gradients: the gradients of do . to + tdo . o, and so for lse."""

    @staticmethod
    def forward(
        needed: tuple[bool, ...], functions: dict[str, Any], *arguments: Any
    ) -> tuple[Tensor, ...]:
        grads, tensors, moves, pushes, fields = _parted(arguments)
        inputs = (*tensors, unflat(fields)._replace(**functions))
        results = gradients_of_pushed(grads, inputs, moves, pushes, needed)
        return tuple(x for x in results if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *dgrads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Third derivatives, by the formula."""
        needed, functions, *arguments = kept(ctx)
        (tdo, tdlse, do, dlse), (q, k, v, _, _), moves, _, fields = _parted(arguments)
        options = unflat(fields)._replace(**functions)
        primals = (do, dlse, q, k, v, *options.differentiable)
        count = len(primals)

        def function(*tensors: Any) -> tuple[Tensor, ...]:
            of_moved = dict(zip(("q", "k", "v", *MOVED), tensors[count + 2 :], strict=True))
            tangents = (*tensors[count : count + 2], *(of_moved.get(name) for name in NAMES))
            return _tangents_by_formula(options, needed, tensors[:count], tangents)

        needs = ctx.needs_input_grad[2:]
        of_o, of_qkv, of_moves, _, of_fields = _parted(needs)
        learned_needs = needed_of((*of_qkv[:3], *of_fields))
        wanted = [*of_o[2:], *learned_needs, *of_o[:2], *of_moves]
        tensors = (*primals, tdo, tdlse, *moves)
        of = gradients_by_formula(function, tensors, wanted, tuple(map(unless_zero, dgrads)))
        rest = placed(of[2:count], 3 + len(of_fields))
        of_tangents = of[count:]
        of_call = (*of_tangents[:2], *of[:2], *rest[:3], None, None, *of_tangents[2:])
        return (None, None, *of_call, None, None, *rest[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Dims, *arguments: Any) -> tuple[tuple[Tensor, ...], Dims]:
        return mapped(_TangentOfGradients.apply, 2, info.batch_size, in_dims, arguments)


def _parted(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of `_TangentOfGradients`: gradients of o and lse and their tangents first, then q,
    k, v, o and lse, tangents of q, k, v and MOVED, those of o and lse, and fields.
    """
    sizes = (4, 5, 3 + len(MOVED), 2)
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return (*(arguments[a:b] for a, b in pairwise(ends)), arguments[ends[-1] :])


def _tangents_by_formula(
    options: Options,
    needed: Sequence[bool],
    primals: Sequence[Tensor | None],
    moves: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Tangents of the needed gradients; primals and moves: of do, dlse, q, k, v and LEARNED."""
    function = _gradients_of(options, needed)
    places = [n for n, x in enumerate(moves) if x is not None]

    def of_moved(*moved: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(places, moved, strict=True))
        return function(*(values.get(n, x) for n, x in enumerate(primals)))

    starts, directions = (tuple(x[n] for n in places) for x in (primals, moves))
    tangents: tuple[Tensor, ...] = torch.func.jvp(of_moved, starts, directions)[1]
    return tangents


def _gradients_of(options: Options, needed: Sequence[bool]) -> Callable[..., tuple[Tensor, ...]]:
    """The needed gradients by the formula, as a function of do, dlse, q, k, v and LEARNED."""

    def function(do: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        q, k, v, *fields = rest
        call_options = replaced(options, fields)
        grads = differentiable_gradients(q, k, v, call_options, needed, do, dlse)
        return tuple(x for x in grads if x is not None)

    return function


def _by_formula(
    grads: tuple[Tensor, Tensor | None],
    inputs: Saved,
    needed: Sequence[bool],
    dgrads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of do, dlse, q, k, v and the fields in LEARNED."""
    q, k, v, _, _, options = inputs
    tensors = [*grads, q, k, v, *options.differentiable]
    wanted = [x is not None and x.requires_grad for x in tensors]
    return gradients_by_formula(_gradients_of(options, needed), tensors, wanted, dgrads)


def primal_of(x: Any) -> Any:
    """x without its tangent of the current level."""
    return forward_ad.unpack_dual(x).primal if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]


def unless_zero(x: Tensor | None) -> Tensor | None:
    """x, or None for one of torch's zero tensors, which have no memory."""
    return None if x is None or x._is_zerotensor() else x


def keep(ctx: Any, arguments: Sequence[Any], *outputs: Tensor) -> None:
    """Save arguments of any type, and outputs, for the backward pass."""
    ctx.set_materialize_grads(False)
    ctx.rest = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.save_for_backward(*outputs, *(x if isinstance(x, Tensor) else None for x in arguments))


def kept(ctx: Any) -> list[Any]:
    """Inverse of `keep`: outputs, then arguments."""
    tensors = ctx.saved_tensors
    count = len(tensors) - len(ctx.rest)
    rest = zip(tensors[count:], ctx.rest, strict=True)
    return [*tensors[:count], *(y if x is None else x for x, y in rest)]


def mapped(
    function: Callable[..., Any], first: int, size: int, in_dims: Dims, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Dims]:
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
    """Fold [B, ...] of each of `size` calls to contiguous [size * B, ...], as kernels need lse."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1).contiguous()
