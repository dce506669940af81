"""Attention by the kernels: operators of torch.library, and the eager path that bypasses them.

`attention_forward` and `attention_backward` have fakes and autograd, for torch.compile, export,
vmap and other tracers; `attend` bypasses them if nothing traces.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import kernels, tracing
from ..options import LEARNED, Options
from . import call, flops
from .call import contiguous, fake_in_layout, fake_output, may_be_kept, operator
from .derivatives import transforms
from .derivatives.second_order import gradients
from .gradients import (
    Forward,
    Gradients,
    Kernels,
    as_batch,
    as_packed,
    differentiable_mod_gradients,
    laid,
    mod_gradients,
    needed_of,
    placed,
    save,
    saved,
)
from .schema import unflat

_P = ParamSpec("_P")
_R = TypeVar("_R")
_DETERMINISTIC = "torch.use_deterministic_algorithms(True) rules it out"


def why_not_one_pass(q: Tensor, k: Tensor, options: Options) -> str | None:
    """Reason for two passes of the portable kernels although atomics are permitted, or None."""
    if torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    if options.relative_keys is not None:
        return "its kernel does not support relative_keys"
    if options.key2 is not None:
        return "its kernel does not support key2"
    return None


def why_not_one_pass_on_hopper(q: Tensor, k: Tensor, options: Options) -> str | None:
    """`why_not_one_pass` for the Hopper kernels."""
    if torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    return kernels.hopper_host.why_not_one_pass(q, k, options)


@operator(flops.attended(1, 1))
def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] and lse fp32 [B, H_q, T_q]; see `kernels.forward.launch_forward`."""
    if kernels.decode_splits.why_not_split(q, k, v, options) is None:
        return kernels.forward.launch_few_queries(q, k, v, options)
    return kernels.forward.launch_forward(q, k, v, options)


# Reason that the Hopper kernels are disabled in this process: the first compiler error.
uncompiled: list[str] = []


def by_hopper(
    launch: Callable[_P, _R], otherwise: Callable[_P, _R], *arguments: _P.args, **_: _P.kwargs
) -> _R:
    """Launch a Hopper kernel, or the portable operator if the compiler refuses it.

    The portable kernels then serve all later calls, as an untested release of Triton must not end a
    training run. Tuned tiles are first replaced by the shipped ones.
    """
    try:
        return call.by_shipped_shapes(launch, *arguments, **_)
    except Exception as error:
        if not call.from_compiler(error):
            raise
        cause = " ".join(str(error).split())[:200]
        reason = f"one of its kernels does not compile here: {type(error).__name__}: {cause}"
    result = otherwise(*arguments, **_)  # raises if a user's function is what does not compile
    uncompiled.append(reason)
    warnings.warn(f"fastattn uses triton instead: {uncompiled[0]}", UserWarning, stacklevel=2)
    return result


@operator(flops.attended(1, 1))
def hopper_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`attention_forward` by the Hopper kernels."""
    launch = kernels.hopper_forward.launch_hopper_forward
    return by_hopper(launch, attention_forward.direct, q, k, v, options)


@hopper_forward.op.register_fake
@attention_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *fields: object) -> tuple[Tensor, Tensor]:
    return fake_output(q, v.shape[3], fp32=unflat(fields).fp32_results)


@operator(flops.differentiated)
def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    wanted: str, options: Options,
) -> Gradients:  # fmt: skip
    """dq, dk, dv, delta and the gradients of relative_query or query2, and of key2; empty without
    one. wanted: see `kernels.backward.launch_backward`.
    """
    # Read at run time, as in torch's own ops, since the flag may change after the forward.
    one_pass = options.atomic_dq and why_not_one_pass(q, k, options) is None
    if one_pass and {"q", "k", "v"} <= set(wanted):
        return kernels.backward.launch_backward_one_pass(do, dlse, q, k, v, o, lse, options)
    return kernels.backward.launch_backward(do, dlse, q, k, v, o, lse, wanted, options)


@operator(flops.differentiated)
def hopper_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    wanted: str, options: Options,
) -> Gradients:  # fmt: skip
    """`attention_backward` by the Hopper kernels, where they serve it."""
    if uncompiled:
        return attention_backward.direct(do, dlse, q, k, v, o, lse, wanted, options)
    if options.atomic_dq and why_not_one_pass_on_hopper(q, k, options) is not None:
        options = options._replace(atomic_dq=False)
    launch = kernels.hopper_backward.launch_hopper_backward
    return by_hopper(launch, attention_backward.direct, do, dlse, q, k, v, o, lse, wanted, options)


@hopper_backward.op.register_fake
@attention_backward.op.register_fake
def _(do: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, _, lse, wanted, *fields = arguments
    options = unflat(fields)
    query = options.relative_query if options.query2 is None else options.query2
    dq, dk, dv, dquery, dkey2 = (
        q.new_empty(0)
        if x is None or of not in wanted
        else fake_in_layout(x, *x.shape[1:], fp32=options.fp32_results)
        for of, x in zip("qkvqk", (q, k, v, query, options.key2), strict=True)
    )
    return dq, dk, dv, torch.empty_like(lse), dquery, dkey2


@operator(flops.attended(1, 1))
def attention_backward_bias(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> Tensor:
    """Gradient of attn_bias, fp32 in its shape."""
    return kernels.backward_bias.launch_backward_bias(do, q, k, v, lse, delta, options)


@attention_backward_bias.op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *arguments: object
) -> Tensor:
    bias = unflat(arguments).attn_bias
    assert bias is not None
    return bias.new_empty(bias.shape, dtype=torch.float32)


@operator(flops.attended(1, 1))
def attention_backward_relative(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Gradients of relative_bias and relative_keys in fp32, empty without one."""
    return kernels.backward_relative.launch_backward_relative(do, q, k, v, lse, delta, options)


@attention_backward_relative.op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *arguments: object
) -> tuple[Tensor, Tensor]:
    options = unflat(arguments)
    empty = lse.new_empty(0)
    bias, keys = (
        empty if x is None else x.new_empty(x.shape, dtype=torch.float32)
        for x in (options.relative_bias, options.relative_keys)
    )
    return bias, keys


@operator(flops.attended(1, 1))
def attention_backward_mods(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    loads: list[int], options: Options,
) -> Tensor:  # fmt: skip
    """Gradients of the mod_tensors in `loads`, fp32, flat and concatenated."""
    # torch's legacy vmap knows no operator that returns a list.
    launch = kernels.backward_mods.launch_backward_mods
    grads = launch(do, dlse, q, k, v, o, lse, loads, options)
    return torch.cat([x.flatten() for x in grads])


@attention_backward_mods.op.register_fake
def _(do: Tensor, dlse: Tensor | None, *arguments: Any) -> Tensor:
    q, _, _, _, _, loads, *fields = arguments
    tensors = unflat(fields).mod_tensors
    return q.new_empty(sum(tensors[n].numel() for n in set(loads)), dtype=torch.float32)


def _prepare_portable(
    q: Tensor, k: Tensor, v: Tensor, options: Options, otherwise: Forward
) -> Forward | None:
    if kernels.decode_splits.why_not_split(q, k, v, options) is None:
        return kernels.forward.prepare_few_queries(q, k, v, options, otherwise)
    return kernels.forward.prepare_forward(q, k, v, options, otherwise)


def _prepare_hopper(
    q: Tensor, k: Tensor, v: Tensor, options: Options, otherwise: Forward
) -> Forward | None:
    if uncompiled:
        return None
    return kernels.hopper_forward.prepare_hopper_forward(q, k, v, options, otherwise)


_OPERATORS = Kernels(
    attention_forward.by_op,
    attention_backward.by_op,
    attention_backward_bias.by_op,
    attention_backward_relative.by_op,
    attention_backward_mods.by_op,
)
PORTABLE: Kernels = Kernels(
    attention_forward.direct,
    attention_backward.direct,
    attention_backward_bias.direct,
    attention_backward_relative.direct,
    attention_backward_mods.direct,
    _prepare_portable,
    _OPERATORS,
)
HOPPER: Kernels = PORTABLE._replace(
    forward=hopper_forward.direct,
    backward=hopper_backward.direct,
    prepare=_prepare_hopper,
    operators=_OPERATORS._replace(forward=hopper_forward.by_op, backward=hopper_backward.by_op),
)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *fields = inputs
    save(ctx, q, k, v, unflat(fields), output)


def _op_gradients(
    backward: Kernels, ctx: Any, do: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    return placed(gradients(backward, saved(ctx), needed_of(needs), do, dlse), len(needs))


for _operator, _by in ((attention_forward, PORTABLE), (hopper_forward, HOPPER)):
    _gradients = partial(_op_gradients, _by.seen())
    _operator.op.register_autograd(_gradients, setup_context=setup_context)


def _batched(x: Tensor | None) -> bool:
    return x is not None and is_legacy_batchedtensor(x)


class _Attention(torch.autograd.Function):
    """`attention_forward` without the op, for untraced calls."""

    @staticmethod
    def forward(
        ctx: Any, by: Kernels, options: Options, q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.by = by
        output = by.forward(q, k, v, options)
        save(ctx, q, k, v, options, output)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        # Without learned options there are only q, k and v; with learned mod_tensors, all.
        count = 3 + len(LEARNED)
        needed = (*needs[:count], *(False,) * (count - len(needs)))
        inputs = saved(ctx)  # once, as checkpoints demand
        if any(needs[count:]) and torch.is_grad_enabled():
            return (None, None, *differentiable_mod_gradients(inputs, needs, do, dlse))
        by: Kernels = ctx.by
        # torch's legacy vmap (is_grads_batched=True) calls an op once for each gradient; a mode
        # entered after the forward, such as torch's flop counter, and compiled autograd see ops.
        seen = is_in_torch_dispatch_mode() or torch.compiler.is_compiling()
        if seen or _batched(do) or _batched(dlse):
            by = by.seen()
        of_mods = mod_gradients(by, inputs, needs[count:], do, dlse) if any(needs[count:]) else []
        if of_mods and not any(needed):
            return (None, None, *(None,) * count, *of_mods)
        return (None, None, *gradients(by, inputs, needed, do, dlse)[: len(needs)], *of_mods)


# torch's own `apply` checks every argument for torch.func transforms first; here there are none.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Attention).apply


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, by: Kernels = PORTABLE
) -> tuple[Tensor, Tensor]:
    """o and lse, by the op if something traces or transforms, else by the kernels directly.

    Both give bitwise equal results and gradients. q, k, v (and relative keys and queries) have
    contiguous last dims, multiples of 16 bytes; packed ones have three dims.
    by: the kernels: `HOPPER` if `why_not_hopper` is None.
    """
    options = contiguous(options)
    packed = options.cu_seqlens_q is not None
    if packed:
        q, k, v = as_batch(q), as_batch(k), as_batch(v)
        options = laid(options, as_batch)
    if tracing.in_forward_mode() and 0 in transforms.levels_of_tangents(q, k, v, options):
        o, lse = transforms.dual(by.seen(), q, k, v, options)
    elif not tracing.may_be_traced(q):
        o, lse = launch(by, q, k, v, options)
    elif transforms.transforming():
        o, lse = transforms.attend(by.seen(), q, k, v, options)
    else:
        o, lse = by.seen().forward(q, k, v, options)
    return (as_packed(o), lse[0]) if packed else (o, lse)


def launch(
    by: Kernels, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool = True
) -> Any:
    """o and lse, or o, by these kernels, recorded by autograd if needed, for untraced calls."""
    results = None
    if torch.is_grad_enabled():
        learned = options.differentiable
        tensors = [x for x in (*learned, *options.mod_tensors) if x is not None]
        wanted = q.requires_grad or k.requires_grad or v.requires_grad
        if wanted or any(x.requires_grad for x in tensors):
            mods = options.mod_tensors if any(x.requires_grad for x in options.mod_tensors) else ()
            results = _apply(by, options, q, k, v, *(learned if tensors else ()), *mods)
    if results is None:
        results = by.forward(q, k, v, options)
    return results if return_lse else results[0]


def device_key(dtype: torch.dtype) -> Hashable:
    """Key of the settings that kernels for this dtype depend on, besides their arguments."""
    key: Hashable = kernels.tiles.device_key(dtype)
    return (key, "without hopper") if uncompiled else key


def prepare(
    q: Tensor, k: Tensor, v: Tensor, options: Options, by: Kernels, return_lse: bool
) -> Callable[..., Any] | None:
    """`launch` for calls with this signature, with a cached forward launch.

    Valid while `device_key` is unchanged. None if launches cannot be cached: not on the current
    device, with users' functions, or if tensors must be copied.
    """
    packed = options.cu_seqlens_q is not None
    if not may_be_kept(q, options):
        return None
    if packed and laid(options, as_batch) is not options:
        return None
    assert by.prepare is not None
    forward = by.prepare(q, k, v, options, partial(_packed_forward, by) if packed else by.forward)
    if forward is None:
        return None
    return partial(launch, by._replace(forward=forward), return_lse=return_lse)


def _packed_forward(
    by: Kernels, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    o, lse = by.forward(as_batch(q), as_batch(k), as_batch(v), options)
    return as_packed(o), lse[0]
