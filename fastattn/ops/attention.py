"""The kernels as torch operators, and the short way to them.

`attention_forward` and `attention_backward` are custom ops with fakes and autograd, which is what
torch.compile, export, vmap and other tracers need. A custom op costs the host several times what
the launch does, so `attend` goes around it where nothing traces.

This is the only file of the package that knows the kernels. They are imported on first use, so that
`import fastattn` works where triton does not exist.
"""

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..options import Options
from . import transforms
from .gradients import DIFFERENTIABLE, Ways, as_batch, as_packed, gradients, needed_of, placed, save
from .schema import flat, operator, unflat

MAX_HEAD_DIM = 512
# What fits the registers of a program without matrix units for fp32, or with those of AMD.
MAX_HEAD_DIM_NARROW = 256

TRITON_INSTALLED = find_spec("triton") is not None
# Triton reads this when kernels are imported, and kernels then stay interpreted or compiled.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter: TRITON_INTERPRET=1 at import."""
    return TRITON_INSTALLED and _INTERPRETING


def on_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9.0, which the Hopper kernels are written for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # Of torch's questions about a device this is the one that torch.compile folds into a constant.
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


def why_not_hopper(
    q: Tensor, k: Tensor, v: Tensor, options: Options, device: torch.device | None = None
) -> str | None:
    """Why the Hopper kernels cannot serve a call that the portable ones can, or None.

    device: where the call would be, if not where q is.
    """
    if not on_hopper(device or q.device):
        return "its kernels are written for GPUs of compute capability 9.0"
    from ..kernels.hopper.host import why_not_hopper

    return why_not_hopper(q, k, v, options)


def hopper_has_backward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether the kernels for Hopper serve the backward of a call whose forward they serve."""
    from ..kernels.hopper.host import why_not_hopper

    return why_not_hopper(q, k, v, options, backward=True) is None


def why_not_one_pass(D: int, options: Options, *, hopper: bool = False) -> str | None:
    """Why the gradients of a call do not come in one pass with atomics, if permitted; or None.

    D: head dim. hopper: whether it is the kernels for Hopper that serve its backward.
    """
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms(True) rules it out"
    if hopper:
        from ..kernels.hopper import host

        return host.why_not_one_pass(D, options)
    if options.relative_keys is not None:
        return "its kernel does not know relative_keys"
    return None


@cache
def _kernels() -> ModuleType:
    """What every call needs; a first call does not wait for the kernels of gradients."""
    from .. import kernels
    from ..kernels import forward  # noqa: F401
    from ..kernels.launch import arguments, interpreter, tiles  # noqa: F401

    if interpreting():
        interpreter.mend()
    return kernels


def _device_of(x: Tensor) -> AbstractContextManager[None]:
    """Makes the device of x current: Triton launches there, whatever device the tensors are on."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return guard


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] and lse fp32 [B, H_q, T_q]; see `kernels.forward.launch_forward`."""
    with _device_of(q):
        return _kernels().forward.launch_forward(q, k, v, options)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv, delta and the gradient of relative_query, which is empty without one."""
    _kernels()
    from ..kernels.backward import launch_backward, launch_backward_one_pass

    # Asked when it runs, as torch's own ops do: the flag may change after the forward.
    one_pass = options.atomic_dq and why_not_one_pass(q.shape[3], options) is None
    launch = launch_backward_one_pass if one_pass else launch_backward
    with _device_of(q):
        return launch(do, dlse, q, k, v, o, lse, options)


def _hopper_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`_forward` by the kernels for Hopper."""
    from ..kernels.hopper.forward import launch_hopper_forward

    with _device_of(q):
        return launch_hopper_forward(q, k, v, options)


def _hopper_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_backward` by the kernels for Hopper, where they serve it."""
    _kernels()
    from ..kernels.hopper.backward import launch_hopper_backward

    if not hopper_has_backward(q, k, v, options):
        return _backward(do, dlse, q, k, v, o, lse, options)
    if options.atomic_dq and why_not_one_pass(q.shape[3], options, hopper=True) is not None:
        options = options._replace(atomic_dq=False)
    with _device_of(q):
        grads = launch_hopper_backward(do, dlse, q, k, v, o, lse, options)
    return (*grads, q.new_empty(0))


def _backward_bias(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> Tensor:
    """The gradient of attn_bias, fp32 in its shape."""
    _kernels()
    from ..kernels.backward_bias import launch_backward_bias

    with _device_of(q):
        return launch_backward_bias(do, q, k, v, lse, delta, options)


def _backward_relative(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """The gradients of relative_bias and relative_keys in fp32, empty where there is none."""
    _kernels()
    from ..kernels.backward_relative import launch_backward_relative

    with _device_of(q):
        return launch_backward_relative(do, q, k, v, lse, delta, options)


_QKV = "Tensor q, Tensor k, Tensor v"
_FORWARD = (_QKV, "(Tensor, Tensor)")
_BACKWARD = (
    f"Tensor do, Tensor? dlse, {_QKV}, Tensor o, Tensor lse",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
attention_forward = operator("attention_forward", _forward, *_FORWARD)
attention_backward = operator("attention_backward", _backward, *_BACKWARD)
hopper_forward = operator("hopper_forward", _hopper_forward, *_FORWARD)
hopper_backward = operator("hopper_backward", _hopper_backward, *_BACKWARD)
_GRADIENT_INPUTS = f"Tensor do, {_QKV}, Tensor lse, Tensor delta"
attention_backward_bias = operator(
    "attention_backward_bias", _backward_bias, _GRADIENT_INPUTS, "Tensor"
)
attention_backward_relative = operator(
    "attention_backward_relative", _backward_relative, _GRADIENT_INPUTS, "(Tensor, Tensor)"
)


@hopper_forward.register_fake
@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    lse = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    return _fake_in_layout(q, H_q, T_q, v.shape[3]), lse


@hopper_backward.register_fake
@attention_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dq, dk, dv = (_fake_in_layout(x, *x.shape[1:]) for x in (q, k, v))
    query = unflat(arguments).relative_query
    dquery = q.new_empty(0) if query is None else _fake_in_layout(query, *query.shape[1:])
    return dq, dk, dv, torch.empty_like(lse), dquery


@attention_backward_bias.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *arguments: Any
) -> Tensor:
    bias = unflat(arguments).attn_bias
    assert bias is not None
    return bias.new_empty(bias.shape, dtype=torch.float32)


@attention_backward_relative.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    options = unflat(arguments)
    empty = lse.new_empty(0)
    bias, keys = (
        empty if x is None else x.new_empty(x.shape, dtype=torch.float32)
        for x in (options.relative_bias, options.relative_keys)
    )
    return bias, keys


def _fake_in_layout(like: Tensor, heads: int, rows: int, cols: int) -> Tensor:
    """The strides of `kernels.launch.arguments.empty_in_layout`, which a fake may not import."""
    B = like.shape[0]
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, rows, heads, cols).transpose(1, 2)
    return like.new_empty(B, heads, rows, cols)


def _through_op(op: Any) -> Callable[..., Any]:
    return lambda *arguments: op(*arguments[:-1], *flat(arguments[-1]))


_DIRECT = Ways(_forward, _backward, _backward_bias, _backward_relative)
_HOPPER = _DIRECT._replace(forward=_hopper_forward, backward=_hopper_backward)
BY_OPS = Ways(
    _through_op(attention_forward),
    _through_op(attention_backward),
    _through_op(attention_backward_bias),
    _through_op(attention_backward_relative),
)


HOPPER_BY_OPS = BY_OPS._replace(
    forward=_through_op(hopper_forward), backward=_through_op(hopper_backward)
)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *fields = inputs
    save(ctx, q, k, v, unflat(tuple(fields)), output)


def _op_gradients(
    ways: Ways, ctx: Any, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    return placed(gradients(ways, ctx, needed_of(needs), do, dlse), len(needs))


attention_forward.register_autograd(partial(_op_gradients, BY_OPS), setup_context=setup_context)
hopper_forward.register_autograd(partial(_op_gradients, HOPPER_BY_OPS), setup_context=setup_context)


class _Attention(torch.autograd.Function):
    """`attention_forward` without the op; nothing may trace it."""

    @staticmethod
    def forward(
        ctx: Any, ways: Ways, options: Options, q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.ways = ways
        output: tuple[Tensor, Tensor] = ways.forward(q, k, v, options)
        save(ctx, q, k, v, options, output)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        # A plain call has q, k and v alone.
        needed = (*needs, *(False,) * (3 + len(DIFFERENTIABLE) - len(needs)))
        return (None, None, *gradients(ctx.ways, ctx, needed, do, dlse)[: len(needs)])


# The `apply` of torch's class asks for transforms of torch.func, argument by argument, before it
# comes to this; here nothing transforms.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Attention).apply


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, hopper: bool = False
) -> tuple[Tensor, Tensor]:
    """o and lse, by the op where something traces or transforms, else by the kernels themselves.

    Both ways give the same bits and the same gradients. q, k, v (and relative keys and queries)
    have contiguous last dims that are whole multiples of 16 bytes; packed ones have three dims.
    hopper: by the kernels for Hopper, for which `why_not_hopper` is None.
    """
    if not options.plain:
        options = _in_order(options)
    if options.cu_seqlens_q is None:
        return _attend(q, k, v, options, hopper)
    query = options.relative_query
    if query is not None:
        options = options._replace(relative_query=as_batch(query))
    o, lse = _attend(as_batch(q), as_batch(k), as_batch(v), options, hopper)
    return as_packed(o), lse[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, hopper: bool
) -> tuple[Tensor, Tensor]:
    output: tuple[Tensor, Tensor]
    if _may_be_traced(q):
        ways = HOPPER_BY_OPS if hopper else BY_OPS
        if transforms.transforming():
            return transforms.attend(ways, q, k, v, options)
        output = ways.forward(q, k, v, options)
        return output
    return attend_by(_HOPPER if hopper else _DIRECT, q, k, v, options)


def attend_by(
    ways: Ways, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """`attend` where nothing traces, by ways that lead through no ops."""
    if torch.is_grad_enabled():
        others = () if options.plain else options.differentiable
        wanted = q.requires_grad or k.requires_grad or v.requires_grad
        if wanted or any(x is not None and x.requires_grad for x in others):
            return _apply(ways, options, q, k, v, *others)
    output: tuple[Tensor, Tensor] = ways.forward(q, k, v, options)
    return output


def ways_of(q: Tensor, *, hopper: bool = False) -> Ways:
    """The ways to the kernels for a call with this q, traced or not."""
    if _may_be_traced(q):
        return HOPPER_BY_OPS if hopper else BY_OPS
    return _HOPPER if hopper else _DIRECT


def place(dtype: torch.dtype) -> Hashable:
    """What kernels for this dtype go by beside their arguments: equal where they are the same."""
    kernels = _kernels()
    return kernels.launch.tiles.device_key(), kernels.launch.arguments.dot_precision(dtype)


def prepare(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Ways | None:
    """Ways for calls that differ from this one in the contents of q, k and v alone.

    They are good as long as `place` is the same. None where such a call has to be worked out anew:
    on a device that is not the current one, and for tensors that kernels cannot read as they lie.
    """
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return None
    forward = _kernels().forward.prepare_forward(q, k, v, options)
    return None if forward is None else _DIRECT._replace(forward=forward)


# Read by kernels with a fixed order of elements.
_CONTIGUOUS = (
    "key_padding_mask", "key_lengths", "query_offsets", "prefix_lengths", "q_documents",
    "k_documents", "alibi_slopes", "dropout_seed", "cu_seqlens_q", "cu_seqlens_k", "relative_bias",
    "relative_keys", "sinks",
)  # fmt: skip


def _in_order(options: Options) -> Options:
    """options with copies of those tensors that kernels cannot read as they lie."""
    changed = {}
    for name in _CONTIGUOUS:
        x = getattr(options, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    return options._replace(**changed) if changed else options


def _may_be_traced(q: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )
