"""Packed calls of the torch backend as operators, for tracers.

The torch backend reads the offsets on the host, and calls torch's kernel once per sequence. Traced,
that would be a graph for these lengths only, which torch refuses. An operator is one node for all
lengths.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..options import Options
from ..torch_backend import torch_attention as torch_backend
from ..torch_backend.derivatives import carried
from .attention_ops import setup_context
from .call import refuse_tangents
from .flops import attended
from .gradients import (
    as_batch,
    as_packed,
    differentiable_gradients,
    laid,
    needed_of,
    placed,
    replaced,
    saved,
)
from .schema import flat, operator, unflat


def serves(options: Options) -> bool:
    """Whether a call of the torch backend needs `attend`: packed and traced."""
    if options.cu_seqlens_q is None:
        return False
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `torch_backend.attention` on a packed call, as an operator."""
    if (name := carried(q, k, v, options)) is not None:
        raise NotImplementedError(
            f"{name} has a tangent, which packed calls do not support where torch traces them: "
            "run this call eagerly (torch.compiler.disable)"
        )
    options = laid(options, as_batch)
    forward = varlen_forward_lse if return_lse else varlen_forward
    o, lse = forward(as_batch(q), as_batch(k), as_batch(v), *flat(options))
    return (as_packed(o), lse[0]) if return_lse else as_packed(o)


def _packed(q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool) -> Any:
    options = laid(options, as_packed)
    refuse_tangents({"q": q, "k": k, "v": v}, options)
    return torch_backend.attention(as_packed(q), as_packed(k), as_packed(v), options, return_lse)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o [1, H_q, total_q, D_v] for q [1, H_q, total_q, D] and so on; lse is empty."""
    return as_batch(_packed(q, k, v, options, False)), q.new_empty(0, dtype=torch.float32)


def _forward_lse(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`_forward` with lse, fp32 [1, H_q, total_q], which torch's fused kernel lacks."""
    o, lse = _packed(q, k, v, options, True)
    return as_batch(o), lse[None]


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> list[Tensor]:
    """Gradients of q, k, v and the given fields in LEARNED, from a second forward."""
    # torch disables autograd in operators, but it must record here.
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False), torch.enable_grad():
        q, k, v, *optional = leaves = [
            x.detach().requires_grad_() for x in (q, k, v, *_learned(options))
        ]
        rest = iter(optional)
        fields = [None if x is None else next(rest) for x in options.differentiable]
        results = _packed(q, k, v, replaced(options, fields), dlse is not None)
        o, lse = (results, None) if dlse is None else results
        pairs = [(o, as_packed(do))] if dlse is None else [(o, as_packed(do)), (lse, dlse[0])]
        outputs, douts = [y for y, _ in pairs], [dy for _, dy in pairs]
        grads = torch.autograd.grad(outputs, leaves, douts, materialize_grads=True)
    return [_in_layout(x) for x in grads]


def _learned(options: Options) -> list[Tensor]:
    return [x for x in options.differentiable if x is not None]


def _in_layout(x: Tensor) -> Tensor:
    """x in the layout of operator results: contiguous, or a view of packed memory."""
    return as_batch(as_packed(x).contiguous()) if x.dim() == 4 else x.contiguous()


_QKV = "Tensor q, Tensor k, Tensor v"
_OUTPUTS = "(Tensor, Tensor)"
_FLOPS = attended(1, 1)
varlen_forward = operator("torch_varlen_forward", _forward, _QKV, _OUTPUTS, _FLOPS)
varlen_forward_lse = operator("torch_varlen_forward_lse", _forward_lse, _QKV, _OUTPUTS, _FLOPS)
varlen_backward = operator(
    "torch_varlen_backward",
    _backward,
    f"Tensor do, Tensor? dlse, {_QKV}",
    "Tensor[]",
    attended(4, 3),
)


def _fake_o(q: Tensor, v: Tensor, arguments: Sequence[object]) -> Tensor:
    _, H_q, total_q, _ = q.shape
    wide = unflat(arguments).fp32_results
    dtype = torch.promote_types(q.dtype, torch.float32) if wide else q.dtype
    return as_batch(q.new_empty(total_q, H_q, v.shape[3], dtype=dtype))


@varlen_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return _fake_o(q, v, arguments), q.new_empty(0, dtype=torch.float32)


@varlen_forward_lse.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return _fake_o(q, v, arguments), q.new_empty(q.shape[:3], dtype=torch.float32)


@varlen_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: object
) -> list[Tensor]:
    return [_in_layout(torch.empty_like(x)) for x in (q, k, v, *_learned(unflat(arguments)))]


def _gradients(
    has_lse: bool, ctx: Any, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, _, options = saved(ctx)
    dlse = dlse if has_lse else None
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled():
        results = differentiable_gradients(q, k, v, options, needed_of(needs), do, dlse)
        return placed(results, len(needs))
    do = torch.zeros_like(o) if do is None else do
    grads = iter(varlen_backward(do, dlse, q, k, v, *flat(options)))
    of_qkv = [next(grads) for _ in range(3)]
    fields = [None if x is None else next(grads) for x in options.differentiable]
    return placed([*of_qkv, *fields], len(needs))


for _operator, _has_lse in ((varlen_forward, False), (varlen_forward_lse, True)):
    _operator.register_autograd(partial(_gradients, _has_lse), setup_context=setup_context)
