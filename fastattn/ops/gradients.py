"""Autograd of attention: saved tensors, and which kernel computes which gradient.

The inputs with gradients are q, k, v and the fields of Options in LEARNED, in this order.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..options import LAID_AS, LEARNED, TENSORS, Options
from ..torch_backend import block, formula
from ..torch_backend.derivatives import gradients_by_formula
from ..torch_backend.torch_attention import one_product
from .schema import PLACES

NAMES = ("q", "k", "v", *LEARNED)
# Indices of q, k, v and these fields in an op's arguments.
_PLACES = [0, 1, 2, *(3 + PLACES[name] for name in LEARNED)]
# Indices of tensors in `Options`.
_TENSORS = tuple(map(Options._fields.index, TENSORS))
_MOD_TENSORS = Options._fields.index("mod_tensors")
# With q's or k's gradient come these; those of other options take delta.
_COMES_WITH = {"relative_query": "q", "query2": "q", "key2": "k"}


Pair: TypeAlias = tuple[Tensor, Tensor]
Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Options], Pair]
# do, dlse, q, k, v, o, lse, and what is wanted: dq, dk, dv, delta, and the gradients of a second
# query and of key2.
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward: TypeAlias = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, str, Options], Gradients
]
# do, q, k, v, lse, delta
OfBias: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], Tensor]
OfRelative: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], Pair]
# The last argument serves calls whose rows start between multiples of 16 bytes.
# do, dlse, q, k, v, o, lse, and the tensor of each load
OfMods: TypeAlias = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, list[int], Options],
    Tensor,
]
Prepare: TypeAlias = Callable[[Tensor, Tensor, Tensor, Options, Forward], Forward | None]


class Kernels(NamedTuple):
    """Operators of attention and its gradients, or their launchers.

    prepare: makes a forward for calls of one signature, or None; see `ops.attention_ops.prepare`.
    operators: for launchers, the corresponding operators for tracers.
    """

    forward: Forward
    backward: Backward
    backward_bias: OfBias
    backward_relative: OfRelative
    backward_mods: OfMods
    prepare: Prepare | None = None
    operators: "Kernels | None" = None

    def seen(self) -> "Kernels":
        """The operators (self, if already operators)."""
        return self.operators or self


Saved: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Options]


def save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, output: tuple[Tensor, Tensor]
) -> None:
    """Save tensors for the backward pass."""
    ctx.set_materialize_grads(False)
    if options.batch_invariant:  # its promise is of the forward
        options = options._replace(batch_invariant=False)
    # On the critical path of each training step.
    fields: list[Any] = list(options)
    ctx.places = places = [name for name in _TENSORS if fields[name] is not None]
    if not places and not options.mod_tensors:
        ctx.save_for_backward(q, k, v, *output)
        ctx.options = options
        return
    tensors = [fields[name] for name in places]
    ctx.save_for_backward(q, k, v, *output, *tensors, *options.mod_tensors)
    for name in places:
        fields[name] = None
    fields[_MOD_TENSORS] = None
    # `_make`, in half the time.
    ctx.options = tuple.__new__(Options, fields)


def saved(ctx: Any) -> Saved:
    """Inverse of `save`."""
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    fields = list(ctx.options)
    for name in ctx.places:
        fields[name] = tensors.pop(0)
    fields[_MOD_TENSORS] = tuple(tensors)
    return q, k, v, o, lse, Options._make(fields)


def kernel_gradients(
    kernels: Kernels, inputs: Saved, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """The gradients of q, k, v and the fields in LEARNED by the kernels, not differentiable."""
    return gradients_and_delta(kernels, inputs, needed, do, dlse)[0]


def gradients_and_delta(
    kernels: Kernels, inputs: Saved, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None
) -> tuple[list[Tensor | None], Tensor]:
    """`kernel_gradients`, and delta = rowsum(do * o) - dlse, fp32 like lse."""
    q, k, v, o, lse, options = inputs
    do, dlse = as_read(do, dlse, o)
    learned = options.differentiable
    wanted = {
        name: x
        for name, x, wants in zip(LEARNED, learned, needed[3:], strict=True)
        if wants and x is not None
    }
    of = "qkv"
    if wanted or not all(needed[:3]):
        letters = {_COMES_WITH.get(name, "d") for name in wanted}
        letters |= {x for x, need in zip("qkv", needed, strict=False) if need}
        of = "".join(x for x in "qkvd" if x in letters)
    results = kernels.backward(do, dlse, q, k, v, o, lse, of, options)
    dq, dk, dv, delta, dquery, dkey2 = results
    of_learned: dict[str, Tensor] = {"relative_query": dquery, "query2": dquery, "key2": dkey2}
    if options.key2 is not None and wanted.keys() & {"attn_bias", "relative_bias"}:
        q, k, options = one_product(q, k, options)  # their kernels know no second one
    if "attn_bias" in wanted:
        of_learned["attn_bias"] = kernels.backward_bias(do, q, k, v, lse, delta, options)
    if "relative_bias" in wanted or "relative_keys" in wanted:
        of_learned["relative_bias"], of_learned["relative_keys"] = kernels.backward_relative(
            do, q, k, v, lse, delta, options
        )
    of_learned |= formula.denominator_gradients(wanted, lse, delta)
    others = [of_learned[name] if name in wanted else None for name in LEARNED]
    if not options.fp32_results:
        others = [
            x if x is None or like is None else x.to(like.dtype)
            for x, like in zip(others, learned, strict=True)
        ]
    of_qkv = [x if need else None for x, need in zip((dq, dk, dv), needed, strict=False)]
    return [*of_qkv, *others], delta


def mod_gradients(
    kernels: Kernels | None, inputs: Saved, wanted: Sequence[bool], do: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of mod_tensors, by a kernel, or by torch: without kernels, or if score_mod has an
    unknown derivative.
    """
    from ..jit_functions.derivative import NotDifferentiable, load_gradients

    q, k, v, o, lse, options = inputs
    do, dlse = as_read(do, dlse, o)
    function, loads = None, list[int]()
    if kernels is not None:
        with suppress(NotDifferentiable):
            function, loads = load_gradients(options.score_mod, options.mod_tensors, wanted)
    if kernels is None or function is None:
        grads = _mod_gradients_in_chunks(do, dlse, q, k, v, o, lse, options)
    else:
        atomic = options.atomic_dq and not torch.are_deterministic_algorithms_enabled()
        options = options._replace(score_mod_grad=function, atomic_dq=atomic)
        together = kernels.backward_mods(do, dlse, q, k, v, o, lse, loads, options)
        sizes = [x.numel() if n in loads else 0 for n, x in enumerate(options.mod_tensors)]
        grads = list(torch.split(together, sizes))
    wide = options.fp32_results
    return [
        (x.view(of.shape).to(x if wide else of) if x.numel() else torch.zeros_like(of))
        if wants
        else None
        for x, of, wants in zip(grads, options.mod_tensors, wanted, strict=True)
    ]


def _mod_gradients_in_chunks(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> list[Tensor]:  # fmt: skip
    delta = (formula.wide(do, None) * o).sum(-1)
    delta = delta if dlse is None else delta - dlse
    if options.cu_seqlens_q is not None:
        options = laid(options, as_packed)
    grads = iter(block.mod_gradients((do, q, lse, delta, k), v, options))
    return [next(grads) if x.is_floating_point() else x for x in options.mod_tensors]


def as_read(do: Tensor | None, dlse: Tensor | None, o: Tensor) -> tuple[Tensor, Tensor | None]:
    """do and dlse for kernels: do is not None, with a contiguous last dim."""
    if do is None:
        do = torch.zeros_like(o)
    if do.stride(-1) != 1:
        do = do.contiguous()
    return do, None if dlse is None else dlse.contiguous()


def differentiable_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    needed: Sequence[bool],
    do: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """`kernel_gradients` by torch's formula, for create_graph=True."""
    inputs = (q, k, v, *options.differentiable)
    return gradients_by_formula(formula_of(options), inputs, needed, (do, dlse))


def differentiable_mod_gradients(
    inputs: Saved, needed: Sequence[bool], do: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """`differentiable_gradients`, and those of mod_tensors."""
    q, k, v, _, _, options = inputs
    tensors = (q, k, v, *options.differentiable, *options.mod_tensors)
    count = len(tensors) - len(options.mod_tensors)

    def function(*tensors: Any) -> tuple[Tensor, Tensor]:
        return formula_of(options._replace(mod_tensors=tensors[count:]))(*tensors[:count])

    return gradients_by_formula(function, tensors, needed, (do, dlse))


def formula_of(options: Options) -> Callable[..., tuple[Tensor, Tensor]]:
    """o and lse as a function of q, k, v and LEARNED; packed sequences have a batch dim."""

    def function(q: Tensor, k: Tensor, v: Tensor, *fields: Tensor | None) -> tuple[Tensor, Tensor]:
        call_options = replaced(options, fields)
        if options.cu_seqlens_q is None:
            o, lse = formula.attention(q, k, v, call_options, return_lse=True)
            return o, lse
        rows = (as_packed(q), as_packed(k), as_packed(v))
        o, lse = formula.attention(*rows, laid(call_options, as_packed), return_lse=True)
        return as_batch(o), lse[None]

    return function


def replaced(options: Options, fields: Sequence[Tensor | None]) -> Options:
    """Options with other tensors in LEARNED."""
    values: dict[str, Any] = dict(zip(LEARNED, fields, strict=True))
    return options._replace(**values)


def needed_of(needs: Sequence[bool]) -> list[bool]:
    """Whether q, k, v and the fields in LEARNED need a gradient, from an op's arguments."""
    return [needs[index] for index in _PLACES]


def placed(gradients: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    """Gradients of an op's arguments from gradients of q, k, v and the fields in LEARNED."""
    grads: list[Tensor | None] = [None] * count
    for index, grad in zip(_PLACES, gradients, strict=True):
        grads[index] = grad
    return tuple(grads)


def as_batch(x: Tensor) -> Tensor:
    """[total, H, D] as [1, H, total, D], without a copy."""
    return x.transpose(0, 1)[None]


def as_packed(x: Tensor) -> Tensor:
    """Inverse of `as_batch`."""
    return x[0].transpose(0, 1)


def laid(options: Options, how: Callable[[Tensor], Tensor]) -> Options:
    """Options with `how` applied to the tensors with the layout of q or k."""
    values = {name: getattr(options, name) for name in LAID_AS}
    changed: dict[str, Any] = {name: how(x) for name, x in values.items() if x is not None}
    return options._replace(**changed) if changed else options
