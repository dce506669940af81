"""Attention by torch's own fused kernel, with the semantics of ours.

It is the fast path on a CPU and the last resort elsewhere. Two things are added to
torch.nn.functional.scaled_dot_product_attention: keys that are padded out are zeroed first, because
torch lets a NaN in them through, and a mask is built only where torch has no flag for it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .checks import Window


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Window,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_offset: int | Tensor | None,
    scale: float,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `fastattn.attention`, with every argument already checked.

    lse is not among torch's outputs: with return_lse the plain formula runs, in fp32 or wider, and
    holds all scores in memory.
    """
    B, _, T_q, _ = q.shape
    T_k = k.shape[2]
    if return_lse or T_q == 0 or T_k == 0 or B == 0:
        return _plain(
            q,
            k,
            v,
            causal=causal,
            window=window,
            key_padding_mask=key_padding_mask,
            key_lengths=key_lengths,
            query_offset=query_offset,
            scale=scale,
            return_lse=return_lse,
        )
    padded = key_padding_mask is not None or key_lengths is not None
    if padded:
        hidden = ~reference.existing_keys(B, T_k, key_padding_mask, key_lengths, q.device)
        k = k.masked_fill(hidden[:, None, :, None], 0.0)
        v = v.masked_fill(hidden[:, None, :, None], 0.0)
    # An `if`, since torch takes no symbolic bool: under torch.compile it becomes a guard.
    is_causal = False
    if causal and window is None and not padded and _stands_on_diagonal(query_offset, T_q, T_k):
        is_causal = True
    # The newest single query sees every key: decoding needs no mask.
    sees_all = causal and T_q == 1 and query_offset is None and window is None
    mask = None
    if padded or window is not None or (causal and not is_causal and not sees_all):
        mask = reference.visible_mask(
            T_q,
            T_k,
            causal=causal,
            window=window,
            key_padding_mask=key_padding_mask,
            key_lengths=key_lengths,
            query_offset=query_offset,
            device=q.device,
        )
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if mask is not None and q.device.type != "cpu":
        # On a CPU torch gives such rows 0 by itself; its CUDA kernels do not all agree.
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o


def _stands_on_diagonal(query_offset: int | Tensor | None, T_q: int, T_k: int) -> bool:
    """Whether query 0 stands at key 0, which is what torch's is_causal means."""
    if isinstance(query_offset, Tensor):
        return False
    return T_q == T_k if query_offset is None else query_offset == 0


def _plain(q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> Tensor | tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    result = reference.attention(q.to(wide), k.to(wide), v.to(wide), **arguments)  # type: ignore[arg-type]
    if isinstance(result, tuple):
        return result[0].to(q.dtype), result[1].float()
    return result.to(q.dtype)
