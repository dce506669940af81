"""Operators of statistics of scores and weights, without gradients (except o and lse)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..options import Options
from . import flops
from .attention_ops import HOPPER, PORTABLE, attend, by_hopper, setup_context
from .call import contiguous, fake_output, operator
from .derivatives.second_order import gradients
from .gradients import Kernels, as_batch, as_packed, laid, needed_of, placed, saved
from .schema import unflat


def _computed(times: int) -> flops.Formula:
    """Count the scores `times` times, and again if lse is computed."""

    def count(arguments: Mapping[str, Any]) -> int:
        return flops.attended(times + (arguments["lse"] is None), 0)(arguments)

    return count


@operator(_computed(2))
def attention_statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Entropy, weight received, largest weights and their keys, distance.

    Last dims are contiguous multiples of 16 bytes; lse is fp32 and contiguous.
    """
    launch = kernels.statistics
    if lse is None:
        lse = launch.launch_lse(q, k, options)
    entropy, distance, largest, positions = launch.launch_row_statistics(q, k, lse, options, top)
    return entropy, launch.launch_received(q, k, lse, options), largest, positions, distance


@attention_statistics.op.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    entropy = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    received = q.new_empty(B, H_q, k.shape[2], dtype=torch.float32)
    largest = q.new_empty(B, H_q, T_q, top, dtype=torch.float32)
    positions = q.new_empty(B, H_q, T_q, top, dtype=torch.int64)
    return entropy, received, largest, positions, torch.empty_like(entropy)


@operator(_computed(1))
def attention_weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    """All weights, fp32 [B, H_q, T_q, T_k]; arguments as for `attention_statistics`."""
    if lse is None:
        lse = kernels.statistics.launch_lse(q, k, options)
    return kernels.statistics.launch_weights(q, k, lse, options)


@attention_weights.op.register_fake
def _(q: Tensor, k: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32)


@operator(flops.attended(1, 1))
def attention_forward_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and the largest score of each query, fp32 like lse; see `kernels.forward`."""
    return kernels.forward.launch_forward_with_max(q, k, v, options)


@operator(flops.attended(1, 1))
def hopper_forward_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_forward_with_max` by the Hopper kernels."""
    launch = kernels.hopper_forward.launch_hopper_forward_with_max
    return by_hopper(launch, attention_forward_with_max.direct, q, k, v, options)


@hopper_forward_with_max.op.register_fake
@attention_forward_with_max.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *fields: object) -> tuple[Tensor, Tensor, Tensor]:
    o, lse = fake_output(q, v.shape[3], fp32=unflat(fields).fp32_results)
    return o, lse, torch.empty_like(lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    setup_context(ctx, inputs, output[:2])
    ctx.mark_non_differentiable(output[2])


def _gradients(
    by: Kernels, ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    return placed(gradients(by, saved(ctx), needed_of(needs), do, dlse), len(needs))


WITH_MAX = {
    "triton": (attention_forward_with_max, PORTABLE),
    "hopper": (hopper_forward_with_max, HOPPER),
}
for _forward, _by in WITH_MAX.values():
    _forward.op.register_autograd(partial(_gradients, _by.seen()), setup_context=_save)


def attend_with_max(
    q: Tensor, k: Tensor, v: Tensor, options: Options, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend.attend` by the kernels of a backend, with the largest score of each query."""
    forward, by = WITH_MAX[backend]
    packed = options.cu_seqlens_q is not None
    if torch.is_grad_enabled() and any(x.requires_grad for x in options.mod_tensors):
        found: list[Tensor] = []  # an operator has no gradients of these

        def attended(*call: Any) -> tuple[Tensor, Tensor]:
            o, lse, largest = forward.direct(*call)
            found.append(largest)
            return o, lse

        o, lse = attend(q, k, v, options, by._replace(forward=attended))
        return o, lse, found[0][0] if packed else found[0]
    options = contiguous(options)
    if not packed:
        return forward.by_op(q, k, v, options)
    o, lse, largest = forward.by_op(as_batch(q), as_batch(k), as_batch(v), laid(options, as_batch))
    return as_packed(o), lse[0], largest[0]
