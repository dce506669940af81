"""torch.library operators of additive attention, with gradients."""

from typing import Any

import torch
from torch import Tensor

import fastattn.kernels as kernels

from .. import tracing
from ..options import Options
from ..torch_backend import additive as additive_formula
from ..torch_backend.double_backward import gradients_with_graph
from . import flops, schema
from .call import contiguous, fake_in_layout, fake_output, operator
from .gradients import as_read, save, saved


@operator(flops.attended(1, 1))
def additive_forward(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o and lse; see `kernels.additive.launch_additive_forward`."""
    return kernels.additive.launch_additive_forward(q, k, v, u, options)


@additive_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return fake_output(q, v.shape[3])


@operator(flops.attended(4, 2))
def additive_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and du, the last in fp32."""
    return kernels.additive.launch_additive_backward(do, dlse, q, k, v, u, o, lse, options)


@additive_backward.op.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, u: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (fake_in_layout(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv, u.new_empty(u.shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, u, *flat = inputs
    options = schema.unflat(tuple(flat))
    # u is saved as the first of mod_tensors.
    save(ctx, q, k, v, options._replace(mod_tensors=(u, *options.mod_tensors)), output)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, kept = saved(ctx)
    u, *of_functions = kept.mod_tensors
    options = kept._replace(mod_tensors=tuple(of_functions))
    others = (None,) * (len(ctx.needs_input_grad) - 4)
    if torch.is_grad_enabled():
        needed = ctx.needs_input_grad[:4]
        return *_differentiable_gradients((q, k, v, u), options, needed, (do, dlse)), *others
    do, dlse = as_read(do, dlse, o)
    dq, dk, dv, du = additive_backward.by_op(do, dlse, q, k, v, u, o, lse, options)
    return dq, dk, dv, du.to(u.dtype), *others


def _differentiable_gradients(
    inputs: tuple[Tensor, ...],
    options: Options,
    needed: tuple[bool, ...],
    dout: tuple[Tensor | None, Tensor | None],
) -> list[Tensor | None]:
    """`_gradients` by torch's formula, for create_graph=True."""

    def function(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return additive_formula.attention(q, k, v, u, options)

    return gradients_with_graph(function, inputs, needed, dout)


additive_forward.op.register_autograd(_gradients, setup_context=_setup_context)


def attend(q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse in fp32, from the kernels.

    q and k are projected; last dims are contiguous multiples of 16 bytes; u is [H_q, D].
    """
    if tracing.transforming():
        # torch.func cannot differentiate an operator with its own gradients.
        return additive_formula.attention(q, k, v, u, options)
    return additive_forward.by_op(q, k, v, u.contiguous(), contiguous(options))
