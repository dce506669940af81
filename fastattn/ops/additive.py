"""The kernels of additive attention as torch operators, with gradients."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..options import Options
from ..torch_backend import additive as additive_formula
from ..torch_backend.double_backward import gradients_with_graph
from . import attention, schema


@cache
def _kernels() -> ModuleType:
    attention._kernels()  # which repairs the interpreter, where there is one
    from ..kernels import additive

    return additive


def _forward(q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o and lse; see `kernels.additive.launch_additive_forward`."""
    with attention._device_of(q):
        found: tuple[Tensor, Tensor] = _kernels().launch_additive_forward(q, k, v, u, options)
        return found


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, u: Tensor, o: Tensor,
    lse: Tensor, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and du, the last in fp32."""
    with attention._device_of(q):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _kernels().launch_additive_backward(
            do, dlse, q, k, v, u, o, lse, options
        )
        return found


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor u"
additive_forward = schema.operator("additive_forward", _forward, _INPUTS, "(Tensor, Tensor)")
additive_backward = schema.operator(
    "additive_backward",
    _backward,
    f"Tensor do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse",
    "(Tensor, Tensor, Tensor, Tensor)",
)


@additive_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    lse = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    return attention._fake_in_layout(q, H_q, T_q, v.shape[3]), lse


@additive_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, u: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (attention._fake_in_layout(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv, u.new_empty(u.shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, u, *flat = inputs
    options = schema.unflat(tuple(flat))
    ctx.names = [
        name for name, x in zip(options._fields, options, strict=True) if isinstance(x, Tensor)
    ]
    masks = (getattr(options, name) for name in ctx.names)
    ctx.save_for_backward(q, k, v, u, *output, *masks, *options.mod_tensors)
    absent: dict[str, Any] = dict.fromkeys(ctx.names)
    ctx.options = options._replace(**absent, mod_tensors=())
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, u, o, lse, *tensors = ctx.saved_tensors
    count = len(ctx.names)
    masks: dict[str, Any] = dict(zip(ctx.names, tensors[:count], strict=True))
    saved: Options = ctx.options
    options = saved._replace(**masks, mod_tensors=tuple(tensors[count:]))
    others = (None,) * (len(ctx.needs_input_grad) - 4)
    if torch.is_grad_enabled():
        needed = ctx.needs_input_grad[:4]
        return *_differentiable_gradients((q, k, v, u), options, needed, do, dlse), *others
    if do is None:
        do = torch.zeros_like(o)
    if do.stride(-1) != 1:
        do = do.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv, du = additive_backward(do, dlse, q, k, v, u, o, lse, *schema.flat(options))
    return dq, dk, dv, du.to(u.dtype), *others


def _differentiable_gradients(
    inputs: tuple[Tensor, ...], options: Options, needed: tuple[bool, ...],
    do: Tensor | None, dlse: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """`_gradients` by the formula, for create_graph=True."""

    def function(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return additive_formula.attention(q, k, v, u, options)

    return gradients_with_graph(function, inputs, needed, (do, dlse))


additive_forward.register_autograd(_gradients, setup_context=_setup_context)


def attend(q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse in fp32, from the kernels.

    q and k are projected; last dims are contiguous and whole multiples of 16 bytes; u is [H_q, D].
    """
    options = attention._in_order(options)
    found: tuple[Tensor, Tensor] = additive_forward(q, k, v, u.contiguous(), *schema.flat(options))
    return found
