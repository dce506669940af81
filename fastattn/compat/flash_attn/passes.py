"""Forward and backward passes of flash_attn_interface, for ring attention.

Ring attention calls these on parts of the keys: it merges the forward's results, and calls the
backward on each part with the merged out and lse.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...functional.block import BlockGradients, attention_block_backward
from ...functional.fused_attention import attention, attention_varlen
from ...torch_backend import dropout
from .argument_order import of_version
from .conventions import checked, errors_of_flash_attn, options_of
from .packed import attend_packed

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
    """Raise: probabilities are not returned here."""
    raise NotImplementedError(
        "_get_block_size_n tells how flash-attn lays out the probabilities that it returns; "
        "fastattn.compat.flash_attn returns none, and fastattn.attention_weights computes them"
    )


Forward = tuple[Tensor, Tensor, Tensor, Tensor]
_OF_BACKWARD = ("dout", "q", "k", "v", "out")


@of_version(2)
def _flash_attn_forward(**call: Any) -> Forward:
    """`flash_attn_func`, returning (out, lse, weights, rng_state).

    Args:
        q, k, v, dropout_p, softmax_scale, causal, softcap, alibi_slopes: see there.
        window_size_left, window_size_right: its window_size.
        return_softmax: ignored: the weights, for tests of dropout, are empty.

    Returns:
        out [B, T_q, H_q, D_v]; lse fp32 [B, H_q, T_q]; an empty tensor; int64 [2], the backward's
        rng_state. None has a gradient.
    """
    heads_first = [checked(name, call[name], 4).transpose(1, 2) for name in "qkv"]
    o, lse, weights, seed = _forward(attention, heads_first, call)
    return o.transpose(1, 2).contiguous(), lse, weights, seed


@of_version(2)
def _flash_attn_varlen_forward(**call: Any) -> Forward:
    """`_flash_attn_forward` for packed sequences.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k: as for `flash_attn_varlen_func`.
        block_table, seqused_k: of k and v in pages, as there; without pages seqused_k is refused.
        leftpad_k: refused.
        max_seqlen_q, max_seqlen_k, zero_tensors, num_splits: change nothing.

    Returns:
        Likewise, with out [total_q, H_q, D_v] and lse fp32 [H_q, total_q].
    """
    table, used = call.get("block_table"), call.get("seqused_k")
    for name in ("leftpad_k", "seqused_k")[: 1 + (table is None)]:
        if call.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported by _flash_attn_varlen_forward")
    tensors = [call[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    attend: Any = attention_varlen
    if table is not None:
        *tensors, offsets = tensors
        lengths = offsets.diff() if used is None else used
        pages = {"lengths": lengths, "block_table": table, "max_seqlen_q": call["max_seqlen_q"]}
        attend = partial(attend_packed, **pages)
    o, lse, weights, seed = _forward(attend, tensors, call)
    return o, lse, weights, seed


@of_version(2)
def _flash_attn_backward(**call: Any) -> Tensor:
    """Write the gradients of q, k and v into dq, dk and dv.

    Args:
        dout, out: [B, T_q, H_q, D_v]; softmax_lse: fp32 [B, H_q, T_q]. out and softmax_lse may
            include more keys than k and v: the gradients are then this part's share.
        dq, dk, dv: as q, k and v; overwritten. None = not computed.
        deterministic: accepted; gradients are the same from run to run in any case.
        rng_state: from the forward, if weights were dropped.

    Returns:
        fp32 [B, H_q, T_q]: dout.out.
    """
    tensors = [checked(name, call[name], 4).transpose(1, 2) for name in _OF_BACKWARD]
    gradients = _backward(tensors, (), call)
    _write(call, [x.transpose(1, 2) for x in gradients[:3]])
    return gradients.delta


@of_version(2)
def _flash_attn_varlen_backward(**call: Any) -> Tensor:
    """`_flash_attn_backward` for packed sequences.

    softmax_lse and the result are fp32 [H_q, total_q]. max_seqlen_q, max_seqlen_k and zero_tensors
    change nothing.
    """
    tensors = [checked(name, call[name], 3) for name in _OF_BACKWARD]
    gradients = _backward(tensors, (call["cu_seqlens_q"], call["cu_seqlens_k"]), call)
    _write(call, gradients[:3])
    return gradients.delta


# In flash-attn the wrapped functions are operators; diffusers takes these names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _options(call: dict[str, Any]) -> dict[str, Any]:
    window = (call.get("window_size_left", -1), call.get("window_size_right", -1))
    scores = (call["softmax_scale"], call["causal"], window, call.get("softcap", 0.0))
    return options_of(call["dropout_p"], *scores, call.get("alibi_slopes"), None)


def _forward(attend: Any, tensors: list[Tensor], call: dict[str, Any]) -> Forward:
    """Compute o, lse, no weights, and the seed of dropout."""
    options, device = _options(call), tensors[0].device
    with errors_of_flash_attn(), torch.no_grad():
        seed = torch.zeros(2, dtype=torch.int64, device=device)
        if "dropout" in options:
            seed = options["dropout_seed"] = dropout.draw_seed(device)
        o, lse = attend(*tensors, return_lse=True, **options)
    return o, lse, o.new_empty(0), seed


def _backward(
    tensors: list[Tensor], offsets: tuple[Tensor, ...], call: dict[str, Any]
) -> BlockGradients:
    """Compute the gradients of q, k and v."""
    options, lse = _options(call), call["softmax_lse"]
    do, q, k, v, o = tensors
    with errors_of_flash_attn(), torch.no_grad():
        if "dropout" in options:
            options["dropout_seed"] = call.get("rng_state")
            if options["dropout_seed"] is None:
                raise ValueError("rng_state must be the one that the forward returned, got None")
        sizes = checks.sizes_of(q) | {"D_v": v.shape[-1]}
        dims = checks.DENSE[0] if q.dim() == 4 else checks.PACKED[0]
        for name, x in (("dout", do), ("out", o)):
            checks.check_input(name, x, "as q", f"{dims}_v", q, sizes)
        rows = "B H_q T_q" if q.dim() == 4 else "H_q total_q"
        checks.check_input("softmax_lse", lse, "float32", rows, q, sizes)
        return attention_block_backward(do, q, k, v, o, lse, *offsets, **options)


def _write(call: dict[str, Any], grads: Sequence[Tensor]) -> None:
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if call[name] is not None:
            call[name].copy_(grad)
