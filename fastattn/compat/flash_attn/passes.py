"""flash_attn_interface's forward and backward passes, as ring attention calls them.

Projects that spread a sequence over devices, such as ring attention, call these on parts of the
keys: they merge what the forward gives, and call the backward on each part with the out and the lse
of the whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...functional.attend import attention, attention_varlen
from ...functional.block import attention_block_backward
from ...torch_backend import dropout
from .conventions import checked, errors_of_flash_attn, options_of

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]


def _get_block_size_n(*_: Any) -> int:
    """Refused: the layout of probabilities that are not returned here."""
    raise NotImplementedError(
        "_get_block_size_n tells how flash-attn lays out the probabilities that it returns; "
        "fastattn.compat.flash_attn returns none, and fastattn.attention_weights computes them"
    )


Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """(out, lse, weights, rng_state) of `flash_attn_func`'s arguments.

    Args:
        q, k, v, dropout_p, softmax_scale, causal, softcap, alibi_slopes: see there.
        window_size_left, window_size_right: its window_size.
        return_softmax: changes nothing: the weights, which are for tests of dropout, are empty.

    Returns:
        out [B, T_q, H_q, D_v]; lse fp32 [B, H_q, T_q]; an empty tensor; int64 [2], which the
        backward needs to drop the same weights. None has a gradient.
    """
    q, k, v = _checked_all(4, q=q, k=k, v=v)
    window = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, None)
    with errors_of_flash_attn(), torch.no_grad():
        seed = _draw_seed(options, q)
        o, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **options)
    return o.transpose(1, 2).contiguous(), lse, q.new_empty(0), seed


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """`_flash_attn_forward` of packed sequences.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as for `flash_attn_varlen_func`.
        block_table, leftpad_k, seqused_k: refused; `flash_attn_varlen_func` serves the first.
        max_seqlen_q, max_seqlen_k, zero_tensors, num_splits: change nothing.

    Returns:
        As there, with out [total_q, H_q, D_v] and lse fp32 [H_q, total_q].
    """
    refused = {"block_table": block_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
    for name, x in refused.items():
        if x is not None:
            raise NotImplementedError(f"{name} is not served by _flash_attn_varlen_forward")
    window = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, None)
    with errors_of_flash_attn(), torch.no_grad():
        seed = _draw_seed(options, q)
        o, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)
    return o.contiguous(), lse, q.new_empty(0), seed


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients of q, k and v into dq, dk and dv.

    Args:
        dout, out: [B, T_q, H_q, D_v]; softmax_lse: fp32 [B, H_q, T_q]. out and softmax_lse may be
            those of more keys than k and v hold: the gradients are then this part's share.
        dq, dk, dv: as q, k and v; overwritten. None: not wanted.
        deterministic: accepted; gradients are the same from run to run in any case.
        rng_state: what the forward returned, where weights were dropped.

    Returns:
        fp32 [B, H_q, T_q]: dout.out.
    """
    window = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, None)
    do, q, k, v, o = _checked_all(4, dout=dout, q=q, k=k, v=v, out=out)
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    with errors_of_flash_attn(), torch.no_grad():
        _take_seed(options, rng_state)
        _check_results(do, o, softmax_lse, q, v, tuple(q.shape[:3]))
        found = attention_block_backward(do, q, k, v, o, softmax_lse, **options)
    _write((dq, dk, dv), [x.transpose(1, 2) for x in found[:3]])
    return found.delta


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences.

    softmax_lse and the result are fp32 [H_q, total_q]. max_seqlen_q, max_seqlen_k and zero_tensors
    change nothing.
    """
    window = (window_size_left, window_size_right)
    options = options_of(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, None)
    dout, q, k, v, out = _checked_all(3, dout=dout, q=q, k=k, v=v, out=out)
    with errors_of_flash_attn(), torch.no_grad():
        _take_seed(options, rng_state)
        _check_results(dout, out, softmax_lse, q, v, (q.shape[1], q.shape[0]))
        found = attention_block_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, **options
        )
    _write((dq, dk, dv), found[:3])
    return found.delta


# There the same functions as operators that torch.compile keeps whole; diffusers takes these names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _draw_seed(options: dict[str, Any], q: Tensor) -> Tensor:
    """Draw the seed of the dropped weights; put it among the options only if some are dropped."""
    if "dropout" not in options:
        return torch.zeros(2, dtype=torch.int64, device=q.device)
    options["dropout_seed"] = dropout.draw_seed(q.device)
    seed: Tensor = options["dropout_seed"]
    return seed


def _take_seed(options: dict[str, Any], rng_state: Tensor | None) -> None:
    """Put the forward's seed among the options, if weights were dropped."""
    if "dropout" in options:
        if rng_state is None:
            raise ValueError("rng_state must be the one that the forward returned, got None")
        options["dropout_seed"] = rng_state


def _checked_all(dims: int, **tensors: Tensor) -> list[Tensor]:
    return [checked(name, x, dims) for name, x in tensors.items()]


def _check_results(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, v: Tensor, shape: tuple[int, ...]
) -> None:
    """dout and out are as q, with v's width; lse is fp32 of a shape."""
    for name, x in (("dout", dout), ("out", out)):
        checks.check_placement(name, x, (*q.shape[:-1], v.shape[-1]), q)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
    checks.check_placement("softmax_lse", lse, shape, q)
    if lse.dtype != torch.float32:
        raise TypeError(f"softmax_lse must be float32, got {lse.dtype}")


def _write(into: tuple[Tensor | None, ...], grads: Sequence[Tensor]) -> None:
    for wanted, grad in zip(into, grads, strict=True):
        if wanted is not None:
            wanted.copy_(grad)
