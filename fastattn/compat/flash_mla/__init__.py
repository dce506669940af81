"""FlashMLA's functions for decoding from latent caches.

import fastattn.compat.flash_mla as flash_mla
"""

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...cache.views import view_of_tensors
from ...functional.decode import decode_attention

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """(None, None), as no plan is needed; takes the arguments of all FlashMLA versions."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    **newer: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens to paged latents, whose first columns are the values.

    Args:
        q: [B, T_q, H_q, D], such as 512 + 64 columns, absorbed.
        k_cache: [pages, page size, H_k, D] in q's dtype; pages of any size.
        block_table: int32 [B, pages of a row].
        cache_seqlens: int32 [B], tokens of each row, the new ones counted.
        head_dim_v: D_v, value columns of a key.
        tile_scheduler_metadata, num_splits: ignored.
        softmax_scale: default D ** -0.5, as in FlashMLA. Pass the model's scale before absorption:
            (128 + 64) ** -0.5 times YaRN's factor.
        causal: new token i sees the tokens up to itself; else all see all.
        attn_sink: float [H_q], the score of one more key of value 0, not included in the lse.
        is_fp8_kvcache, indices, newer (extra_k_cache, ...): not served.

    Returns:
        o [B, T_q, H_q, D_v] and lse, fp32 [B, H_q, T_q], natural log; 0 and -inf without a key.

    Raises:
        NotImplementedError: an argument that is not served.
        TypeError, ValueError: shapes, dtypes or devices disagree.
    """
    others = {"is_fp8_kvcache": is_fp8_kvcache or None, "indices": indices, **newer}
    for name, x in others.items():
        if x is not None:
            raise NotImplementedError(f"{name} is not served by fastattn.compat.flash_mla")
    for name, x in (("q", q), ("k_cache", k_cache)):
        if checks.check_tensor(name, x).dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {list(x.shape)}")
    D, D_v = q.shape[-1], checks.check_count("head_dim_v", head_dim_v, 1)
    if k_cache.shape[-1] != D or D_v > D:
        raise ValueError(
            f"k_cache must have q's {D} columns, of which head_dim_v={D_v} are the value, "
            f"got {k_cache.shape[-1]}"
        )
    pages = k_cache.transpose(1, 2)
    view = view_of_tensors(pages, pages[..., :D_v], cache_seqlens, block_table=block_table)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    o, lse = decode_attention(q.transpose(1, 2), view, causal=causal, scale=scale, return_lse=True)
    if attn_sink is not None:
        checks.check_placement("attn_sink", attn_sink, (q.shape[2],), q)
        # The sink adds exp(sink) to the denominator exp(lse).
        share = torch.sigmoid(lse - attn_sink.float()[:, None])
        o = (o * share.unsqueeze(-1)).to(o.dtype)
    return o.transpose(1, 2), lse
