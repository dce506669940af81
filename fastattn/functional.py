"""Attention as a function: check the arguments, choose a backend, call it."""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, dispatch, ops, torch_backend
from .checks import Window
from .dispatch import Explanation


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window = ...,
    key_padding_mask: Tensor | None = ..., key_lengths: Tensor | None = ...,
    query_offset: int | Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window = ...,
    key_padding_mask: Tensor | None = ..., key_lengths: Tensor | None = ...,
    query_offset: int | Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention softmax(q k^T * scale + mask) v with grouped-query heads; differentiable.

    Query i of batch row b stands at position p = i + query_offset among the keys. Masks combine:
    it sees key j where every one given allows it. With T_q = 2, T_k = 4 (rows are queries):

        causal        window=2      window=(0, 1)    key_lengths=[3]    causal, query_offset=0
        1 1 1 0       0 1 1 0       0 0 1 1          1 1 1 0            1 0 0 0
        1 1 1 1       0 0 1 1       0 0 0 1          1 1 1 0            1 1 0 0

    Args:
        q: [B, H_q, T_q, D], fp16, bf16, fp32 or fp64, any strides. Copied once for the kernels if
            the last dim is not contiguous or rows are not a whole number of 16 bytes.
        k: [B, H_k, T_k, D], same dtype and device. H_k divides H_q; query head h reads K/V head
            h // (H_q // H_k), and K/V are not expanded in memory.
        v: [B, H_k, T_k, D_v].
        causal: p sees keys j <= p.
        window: (left, right) sees p - left <= j <= p + right, None = unbounded on that side; an int
            W is the last W keys, the query's own counted: (W - 1, 0).
        key_padding_mask: bool [B, T_k], True = attend.
        key_lengths: int32 or int64 [B]; row b has keys 0..key_lengths[b] - 1. Values are clamped to
            [0, T_k].
        query_offset: position of query 0, an int or int32/int64 [B]. Default T_k - T_q: the last
            query stands at the last key (bottom-right).
        scale: factor on q.k, > 0; default D ** -0.5.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto" (default; the environment variable FASTATTN_BACKEND
            replaces it). `fastattn.explain` takes the same arguments and tells which one serves.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log. Both are differentiable. A query that sees no key has o = 0, lse = -inf and gradients
        0. A NaN in keys or values that are padded out reaches no output and no gradient. In
        autocast regions q, k and v are cast as torch's own attention casts them.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call; the message names it.
    """
    checks.check_tensors(q, k, v)
    q, k, v = _autocast(q, k, v)
    left, right, scale = checks.check_call(
        q, k, v, causal, window, key_padding_mask, key_lengths, query_offset, scale
    )
    if query_offset is None:
        query_offset = k.shape[2] - q.shape[2]
    choice = dispatch.choose(q, k, v, backend)
    if choice.backend == "torch":
        if not q.is_cpu:
            dispatch.warn_if_slow(choice, q.device)
        return torch_backend.attention(
            q,
            k,
            v,
            left=left,
            right=right,
            key_padding_mask=key_padding_mask,
            key_lengths=key_lengths,
            query_offset=query_offset,
            scale=scale,
            return_lse=return_lse,
        )
    per_row = query_offset if isinstance(query_offset, Tensor) else None
    o, lse = ops.attend(
        _kernel_rows(q),
        _kernel_rows(k),
        _kernel_rows(v),
        None if key_padding_mask is None else key_padding_mask.contiguous(),
        None if key_lengths is None else key_lengths.contiguous(),
        None if per_row is None else per_row.contiguous(),
        query_offset if per_row is None else 0,
        left,
        right,
        scale,
    )
    if o.shape[3] != v.shape[3]:
        o = o[..., : v.shape[3]]
    return (o, lse) if return_lse else o


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Which backend `attention` would use for these arguments, and why not a faster one.

    Checks the arguments as `attention` does, and computes nothing.

    Returns:
        An `Explanation`: `.backend`, and `.reasons` from backend name to reason; `str()` of it is
        meant for people.
    """
    checks.check_tensors(q, k, v)
    q, k, v = _autocast(q, k, v)
    checks.check_call(q, k, v, causal, window, key_padding_mask, key_lengths, query_offset, scale)
    return dispatch.choose(q, k, v, backend)


def _kernel_rows(x: Tensor) -> Tensor:
    """x with contiguous rows of a whole number of 16 bytes; columns of zeros change no score."""
    surplus = -x.shape[-1] % (16 // x.element_size())
    if surplus:
        return F.pad(x, (0, surplus))
    return x if x.stride(-1) == 1 else x.contiguous()


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside torch.autocast, floating tensors in its dtype, as scaled_dot_product_attention has."""
    device = q.device.type
    # torch raises when asked about a device that has no autocast, such as meta.
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    q, k, v = (x.to(dtype) if x.dtype in narrow else x for x in (q, k, v))
    return q, k, v
