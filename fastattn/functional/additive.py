"""Additive attention: scores u^T tanh(W_q q + W_k k) (Bahdanau et al. 2015).

arXiv 1409.0473. "concat" of Luong et al. 2015 (arXiv 1508.04025), u^T tanh(W [q; k]), is equal,
with W_q and W_k the halves of W.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch
from ..ops import spread
from ..torch_backend import additive
from ..torch_backend.masks import existing_keys
from . import call_options, inputs


@call_options.ADDITIVE.sign
def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    w_query: Tensor | None = None,
    w_key: Tensor | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **masks: Any,
) -> call_options.Results:
    """softmax(u^T tanh(W_q q + W_k k)) v (Bahdanau et al. 2015).

    Computed by torch in chunks of queries, which the backward computes again: memory is linear in
    T, without a [T_q, T_k, hidden] tensor. Under torch.compile there is one chunk, whose backward
    may hold that tensor. The tanh of B * H_q * T_q * T_k * hidden numbers take most of the time.

    Args:
        q: [B, H_q, T_q, D_q], fp16, bf16, fp32 or fp64.
        k: [B, H_k, T_k, D_k], likewise; H_k divides H_q, as in `attention`.
        v: [B, H_k, T_k, D_v].
        u: [hidden], or [H_q, hidden] per head, any float dtype.
        w_query: W_q in q's dtype, [hidden, D_q] as in nn.Linear(D_q, hidden), or [H_q, hidden,
            D_q]. None: q is already projected, D_q = hidden (and may include a bias).
        w_key: W_k, [hidden, D_k] or [H_k, hidden, D_k]. None: k is already projected.
        return_lse: also return the log of the softmax denominators.
        backend: "torch" or "auto", which are the same, as it has no kernel.
        masks: causal, window, prefix_lengths, keep_first, stride, key_padding_mask, key_lengths,
            documents, attn_mask (bool), mask_mod, mod_tensors and query_offset, as for `attention`.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q]. Both are
        differentiable in q, k, v, u, w_query and w_key, any number of times. A query that sees no
        key has o = 0, lse = -inf and gradients of 0. NaN in padded-out keys or values does not
        propagate.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or another
            backend; the message names it.
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    _check_backend(backend)
    checks.check_tensors(q, k, v)
    _refuse_others(masks)
    hidden = _check_u(u, q)
    q = inputs.projected("w_query", w_query, "q", q, hidden)
    # Detach: a NaN in padded-out keys would otherwise reach the gradient of W_k.
    keys = k.detach().new_empty(()).expand(*k.shape[:3], hidden)
    options = call_options.dense_options(q, keys.to(q.dtype), v.to(q.dtype), **masks)
    exists = existing_keys(options, k.shape[2], k.device)
    if w_key is not None and exists is not None:
        k = torch.where(exists[:, None, :, None], k, 0.0)
    k = inputs.projected("w_key", w_key, "k", k, hidden)
    q, k, v, _ = inputs.autocast(q, k, v, {})
    checks.check_qkv(q, k, v)
    o, lse = additive.attention(q, k, v, u.expand(q.shape[1], hidden), options)
    return (o, lse.float()) if return_lse else o


def _check_backend(backend: str | None) -> None:
    spread.refuse("additive_attention")
    asked = dispatch.requested_backend(backend)
    if asked not in ("auto", "torch"):
        raise ValueError(
            f'backend "{asked}" cannot serve additive_attention, which has no kernel: pass "torch"'
        )


def _refuse_others(masks: dict[str, Any]) -> None:
    call_options.ADDITIVE.refuse_others(masks)
    mask = masks.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be a bool tensor (True = attend), got {mask.dtype}")


def _check_u(u: Tensor, q: Tensor) -> int:
    """Check that u is [hidden] or [H_q, hidden] on q's device; return hidden."""
    sizes = checks.sizes_of(q)
    hidden: int = checks.check_input("u", u, "float", "H_q? hidden", q, sizes).shape[-1]
    if not hidden:
        raise ValueError(f"u must have a hidden size of at least 1, got {list(u.shape)}")
    return hidden
