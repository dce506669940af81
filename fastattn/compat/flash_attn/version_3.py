"""flash_attn_interface, flash-attn 3's module, with its argument order and results.

`compat.flash_attn` documents the arguments. As in flash-attn 3, there is no dropout and no ALiBi.
"""

from typing import Any

import torch
from torch import Tensor

from . import version_2
from .argument_order import of_version
from .conventions import Result, checked

__version__ = "3.0.0"
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@of_version(3)
def flash_attn_func(*, return_attn_probs: bool = False, **kwargs: Any) -> Result:
    """Attend: o [B, T_q, H_q, D_v], or with return_attn_probs (o, lse [B, H_q, T_q])."""
    return version_2.flash_attn_func(**kwargs, return_lse=return_attn_probs)


@of_version(3)
def flash_attn_qkvpacked_func(
    *, qkv: Tensor, num_heads_q: int | None = None, **kwargs: Any
) -> Result:
    """`flash_attn_func` of qkv [B, T, 3, H, D], or [B, T, H_q + 2 H_k, D] with num_heads_q."""
    if num_heads_q is None:
        q, k, v = checked("qkv", qkv, 5, (2, 3)).unbind(2)
    else:
        heads_k, odd = divmod(checked("qkv", qkv, 4).shape[2] - num_heads_q, 2)
        if odd or heads_k < 1:
            raise RuntimeError(
                f"qkv must have num_heads_q={num_heads_q} and 2 H_k heads in dim 2, "
                f"got {list(qkv.shape)}"
            )
        q, k, v = torch.split(qkv, [num_heads_q, heads_k, heads_k], dim=2)
    return flash_attn_func(q, k, v, **kwargs)


@of_version(3)
def flash_attn_varlen_func(*, return_attn_probs: bool = False, **kwargs: Any) -> Result:
    """Attend: o [total_q, H_q, D_v], or with return_attn_probs (o, lse [H_q, total_q])."""
    return version_2.flash_attn_varlen_func(**kwargs, return_lse=return_attn_probs)


@of_version(3)
def flash_attn_with_kvcache(*, max_seqlen_q: int | None = None, **kwargs: Any) -> Result:
    """Append and attend: o [B, T_q, H_q, D_v], or with return_softmax_lse (o, lse, None, None)."""
    result = version_2.flash_attn_with_kvcache(**kwargs)
    return (*result, None, None) if kwargs.get("return_softmax_lse") else result


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint parts of the keys, in torch, without gradients.

    Args:
        out_partial: [parts, B, T, H, D], or [parts, total, H, D] of packed sequences.
        lse_partial: fp32 [parts, B, T, H], or [parts, total, H].
        out: also receives the result.
        out_dtype: of the result; default: out_partial's.

    Returns:
        out [B, T, H, D] and lse fp32 [B, T, H], or packed; 0 and -inf for queries without keys.

    Raises:
        RuntimeError: shapes do not fit.
    """
    checked("out_partial", out_partial, 5 if out_partial.dim() == 5 else 4)
    if lse_partial.shape != out_partial.shape[:-1]:
        raise RuntimeError(
            f"lse_partial must have shape {list(out_partial.shape[:-1])}, that of out_partial "
            f"without its last dim, got {list(lse_partial.shape)}"
        )
    with torch.no_grad():
        lse = torch.logsumexp(lse_partial.float(), 0)
        shares = torch.exp(lse_partial - lse).nan_to_num(0.0).unsqueeze(-1)
        merged = torch.where(shares > 0, out_partial * shares, 0.0).sum(0)
        merged = merged.to(out_dtype or out_partial.dtype)
        if out is None:
            return merged, lse
        checked("out", out, merged.dim())
        return out.copy_(merged), lse


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Return None, valid as `scheduler_metadata`: no plan is needed."""
