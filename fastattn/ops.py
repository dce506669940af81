"""The kernels as torch operators, and the short way to them.

`attention_forward` and `attention_backward` are custom ops with fakes and autograd, which is what
torch.compile, export, vmap and other tracers need. A custom op costs the host several times what
the launch does, so `attend` goes around it where nothing traces.

This is the only file of the package that knows the kernels. They are imported on first use, so that
`import fastattn` works where triton does not exist.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .options import Options

MAX_HEAD_DIM = 256

TRITON_INSTALLED = find_spec("triton") is not None
# Triton reads this when kernels are imported, and kernels then stay interpreted or compiled.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter: TRITON_INTERPRET=1 at import."""
    return TRITON_INSTALLED and _INTERPRETING


@cache
def _kernels() -> ModuleType:
    from . import kernels
    from .kernels import backward, forward, interpreter  # noqa: F401

    if interpreting():
        interpreter.mend()
    return kernels


def _device_of(x: Tensor) -> AbstractContextManager[None]:
    """Makes the device of x current: Triton launches there, whatever device the tensors are on."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return guard


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_offsets: Tensor | None,
    query_offset: int,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] and lse fp32 [B, H_q, T_q]; see `kernels.forward.launch_forward`.

    q, k, v have contiguous last dims that are whole multiples of 16 bytes; key_padding_mask is bool
    [B, T_k], contiguous like key_lengths [B] and query_offsets [B]. A query's position is
    query_offsets[b] (or query_offset, if None) + its row; left and right are the band's sides.
    """
    kernels = _kernels()
    mask = kernels.arguments.MaskArguments(
        left, right, query_offset, query_offsets, key_padding_mask, key_lengths
    )
    with _device_of(q):
        return kernels.forward.launch_forward(q, k, v, mask, scale)


attention_forward = torch.library.custom_op(
    "fastattn::attention_forward", _forward, mutates_args=()
)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    lse = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    return _fake_in_layout(q, H_q, T_q, v.shape[3]), lse


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_offsets: Tensor | None,
    query_offset: int,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `_forward`; do has a contiguous last dim, dlse is contiguous."""
    kernels = _kernels()
    mask = kernels.arguments.MaskArguments(
        left, right, query_offset, query_offsets, key_padding_mask, key_lengths
    )
    with _device_of(q):
        return kernels.backward.launch_backward(do, dlse, q, k, v, o, lse, mask, scale)


attention_backward = torch.library.custom_op(
    "fastattn::attention_backward", _backward, mutates_args=()
)


@attention_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_fake_in_layout(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv


def _fake_in_layout(like: Tensor, heads: int, rows: int, cols: int) -> Tensor:
    """The strides of `kernels.arguments.empty_in_layout`, which a fake may not import."""
    B = like.shape[0]
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, rows, heads, cols).transpose(1, 2)
    return like.new_empty(B, heads, rows, cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_padding_mask, key_lengths, query_offsets, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, key_padding_mask, key_lengths, query_offsets)
    ctx.set_materialize_grads(False)


def _gradients(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, *mask_tensors = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    if do.stride(-1) != 1:
        do = do.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    grads = backward(do, dlse, q, k, v, o, lse, *mask_tensors, *ctx.numbers)
    return (*grads, *[None] * (len(mask_tensors) + len(ctx.numbers)))


attention_forward.register_autograd(
    partial(_gradients, attention_backward), setup_context=_setup_context
)


class _Attention(torch.autograd.Function):
    """`attention_forward` without the op; nothing may trace it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(_backward, ctx, do, dlse)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o and lse, by the op where something traces or transforms, else by the kernels themselves.

    Both ways give the same bits and the same gradients, once differentiable.

    Raises:
        NotImplementedError: for options that `why_not` names.
    """
    if (reason := why_not(options)) is not None:
        raise NotImplementedError(reason)
    band = options.band
    assert band is not None and options.query_offset is not None, "why_not lets only bands through"
    arguments = (
        None if options.key_padding_mask is None else options.key_padding_mask.contiguous(),
        None if options.key_lengths is None else options.key_lengths.contiguous(),
        None if options.query_offsets is None else options.query_offsets.contiguous(),
        options.query_offset,
        *band,
        options.scale,
    )
    if _may_be_traced(q):
        return attention_forward(q, k, v, *arguments)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        output: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, *arguments)  # type: ignore[no-untyped-call]
        return output
    return _forward(q, k, v, *arguments)


def why_not(options: Options) -> str | None:
    """Which option the kernels do not compute, as a reason to pass them over, or None."""
    if options.band is None:
        return "there is no kernel for prefix_lengths, keep_first or stride"
    if options.cu_seqlens_q is not None:
        return "there is no kernel for packed sequences"
    served = {"key_padding_mask", "key_lengths", "query_offsets", "query_offset"}
    served |= {"left", "right", "causal", "scale"}
    for name, default in Options._field_defaults.items():
        value = getattr(options, name)
        if name in served:
            continue
        if isinstance(value, Tensor) or value != default:
            return f"there is no kernel for {name}"
    return None


def _may_be_traced(q: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
    )
