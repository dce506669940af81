"""Attention to a cache, and merging of two results, by their kernels; see `call`."""

import os

import torch
from torch import Tensor

from .. import checks, dispatch
from ..cache_view import CacheView
from ..options import Options
from . import call
from .call import Operator, fake_output, kernel


@Operator
def decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    new_lengths: Tensor | None,
    batch_index: Tensor | None,
    pinned: int | None,
    splits: int | None,
    invariant: bool,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o, its rows padded to whole 16 bytes, and lse; see `kernels.decode.launch_decode`."""
    decode = kernel("decode")
    tensors = decode.CacheTensors(
        k, v, k_scale, v_scale, block_table, lengths, lengths, batch_index, pinned
    )
    return decode.launch_decode(
        q, tensors, starts, new_lengths, options, splits=splits, invariant=invariant
    )


@decode_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    elements = 16 // q.element_size()
    return fake_output(q, -(-v.shape[3] // elements) * elements)


def attend(
    q: Tensor,
    view: CacheView,
    new_lengths: Tensor | None,
    options: Options,
    splits: int | None,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] and lse."""
    o, lse = decode_forward(
        q if q.stride(-1) == 1 else q.contiguous(),
        view.k,
        view.v,
        view.k_scale,
        view.v_scale,
        view.block_table,
        view.lengths,
        view.starts,
        new_lengths,
        view.batch_index,
        view.keep_first,
        splits,
        invariant,
        options,
    )
    return o[..., : view.v.shape[3]] if o.shape[3] != view.v.shape[3] else o, lse


def merges(o: Tensor, lse: Tensor, backend: str | None) -> bool:
    """Whether the kernel serves a call of `merge` that wants no gradients.

    Raises:
        ValueError: the backend is unknown, or "triton" cannot serve the call.
    """
    forced = checks.check_backend(backend)
    if forced == "auto" and (named := os.environ.get(dispatch.ENVIRONMENT)):
        forced = checks.check_backend(named, dispatch.ENVIRONMENT)
    if forced == "torch":
        return False
    reason = _why_not_merge(o, lse)
    if forced == "triton" and reason is not None:
        raise ValueError(f'backend "triton" cannot merge: {reason}')
    # Interpreted, the kernel only serves who asks for it: torch does the same at once.
    return reason is None and (forced == "triton" or not o.is_cpu)


def _why_not_merge(o: Tensor, lse: Tensor) -> str | None:
    if not call.TRITON_INSTALLED:
        return "triton is not installed"
    if o.is_cpu and not call.interpreting():
        return "o1 is on the CPU and TRITON_INTERPRET=1 is not set"
    if o.device.type not in ("cpu", "cuda"):
        return f"o1 is on {o.device.type}; kernels exist for CUDA and ROCm devices"
    if torch.float64 in (o.dtype, lse.dtype):
        return "o1 or lse1 is float64; kernels exist for float16, bfloat16 and float32"
    return None


@Operator
def merge_forward(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """o, contiguous, and lse of two parts; see `kernels.combine.launch_merge`."""
    return kernel("combine").launch_merge(o1, lse1, o2, lse2)


@merge_forward.op.register_fake
def _(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return o1.new_empty(o1.shape), lse1.new_empty(lse1.shape)
