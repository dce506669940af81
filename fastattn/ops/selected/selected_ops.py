"""torch.library operators of attention over lists of key blocks, with gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import kernels, tracing
from ...options import Options
from ...torch_backend import formula
from ...torch_backend.derivatives import gradients_with_graph
from ...torch_backend.selected import selected_formula as selected_formula
from .. import schema
from ..call import contiguous, fake_in_layout, fake_output, operator
from ..flops import Formula
from ..gradients import as_read, save, saved


def _attended(wide: int, of_values: int) -> Formula:
    """`flops.attended` for the pairs in lists of n blocks."""

    def count(arguments: Mapping[str, Any]) -> int:
        q, v, lists = arguments["q"], arguments["v"], arguments["lists"]
        keys = min(lists.shape[3] * arguments["block_k"], v.shape[2])
        terms = wide * q.shape[3] + of_values * v.shape[3]
        return int(2 * q.shape[0] * q.shape[1] * q.shape[2] * keys * terms)

    return count


@operator(_attended(1, 1))
def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, counts: Tensor, block_q: int, block_k: int,
    options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse; see `kernels.selected.forward.launch_selected_forward`."""
    launch = kernels.selected_forward.launch_selected_forward
    return launch(q, k, v, lists, counts, (block_q, block_k), options)


@selected_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return fake_output(q, v.shape[3])


@operator(_attended(4, 3))
def selected_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    lists: Tensor, counts: Tensor, block_q: int, block_k: int, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and delta; see `kernels.selected.backward.launch_selected_backward`."""
    launch = kernels.selected_backward.launch_selected_backward
    return launch(do, dlse, q, k, v, o, lse, lists, counts, (block_q, block_k), options)


@selected_backward.op.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (fake_in_layout(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(lse)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lists, counts, block_q, block_k, *flat = inputs
    ctx.block = block_q, block_k
    # Lists are saved as mod_tensors, as there are no functions.
    options = schema.unflat(flat)._replace(mod_tensors=(lists, counts))
    save(ctx, q, k, v, options, output)


# Index of sinks in the operator's arguments.
_SINKS = 7 + schema.PLACES["sinks"]


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, kept = saved(ctx)
    (lists, counts), options = kept.mod_tensors, kept._replace(mod_tensors=())
    needed = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(needed)
    grads: list[Tensor | None]
    places = (0, 1, 2, _SINKS)
    if torch.is_grad_enabled():
        inputs = (q, k, v, options.sinks)
        wanted = tuple(needed[index] for index in places)
        grads = _differentiable_gradients(inputs, lists, ctx.block, options, wanted, (do, dlse))
    else:
        do, dlse = as_read(do, dlse, o)
        block_q, block_k = ctx.block
        dq, dk, dv, delta = selected_backward.by_op(
            do, dlse, q, k, v, o, lse, lists, counts, block_q, block_k, options
        )
        grads, sinks = [dq, dk, dv], options.sinks
        if sinks is not None and needed[_SINKS]:
            dsinks = formula.denominator_gradients({"sinks": sinks}, lse, delta)["sinks"]
            grads.append(dsinks.to(sinks.dtype))
    for index, grad in zip(places, grads, strict=False):
        results[index] = grad
    return tuple(results)


def _differentiable_gradients(
    inputs: tuple[Tensor | None, ...], lists: Tensor, block: tuple[int, int], options: Options,
    needed: tuple[bool, ...], dout: tuple[Tensor | None, Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """`_gradients` by torch's formula, for create_graph=True."""

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        with_sinks = options._replace(sinks=sinks)
        return selected_formula.attention(q, k, v, lists, block, with_sinks)

    return gradients_with_graph(function, inputs, needed, dout)


selected_forward.op.register_autograd(_gradients, setup_context=_setup_context)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, counts: Tensor, block: tuple[int, int],
    options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o in q's dtype and lse in fp32, from the kernels.

    Last dims are contiguous multiples of 16 bytes; lists from `ordered_lists`.
    """
    if tracing.transforming():
        # torch.func cannot differentiate an operator with its own gradients.
        return selected_formula.attention(q, k, v, lists, block, options)
    return selected_forward.by_op(q, k, v, lists, counts, *block, contiguous(options))
