"""FlashMLA's functions: latent attention (MLA) over a paged cache, sparse attention of a prompt.

import fastattn.compat.flash_mla as flash_mla
"""

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...cache.latent import view_of_records
from ...cache.views import view_of_tensors
from ...functional.decode import decode_attention
from ...torch_backend.formula import with_column

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """Return (None, None): no plan is needed; takes the arguments of all FlashMLA versions."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from new tokens to paged latents, whose first columns are the values.

    With indices a token sees only the latents of its indices: DeepSeek's sparse attention.

    Args:
        q: [B, T_q, H_q, D], such as 512 + 64 columns, absorbed.
        k_cache: [pages, page size, H_k, D] in q's dtype; pages of any size. With is_fp8_kvcache
            records [pages, page size, 1, bytes] in a dtype of one byte, and q in bfloat16: 656
            bytes of 512 e4m3 codes, four fp32 scales and 64 rotary columns in bfloat16.
        block_table: int32 [B, pages of a row]; ignored with indices.
        cache_seqlens: int32 [B], tokens of each row, the new ones counted; ignored with indices.
        head_dim_v: D_v, value columns of a key.
        tile_scheduler_metadata, num_splits: ignored.
        softmax_scale: default D ** -0.5, as in FlashMLA. Pass the model's scale before absorption:
            (128 + 64) ** -0.5 times YaRN's factor.
        causal: new token i sees the tokens up to itself; else all see all.
        is_fp8_kvcache: see k_cache.
        indices: int32 [B, T_q, n]: page * page size + slot of each latent that a token sees; a
            number that is no slot, such as -1, names none. One named twice counts twice. causal is
            not supported with it.
        attn_sink: float [H_q], the score of one more key of value 0, not included in the lse.
        topk_length: int32 [B]: how many of a row's indices count, from their start.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: not supported.

    Returns:
        o [B, T_q, H_q, D_v] and lse, fp32 [B, H_q, T_q], natural log; 0 and -inf without a key.

    Raises:
        NotImplementedError: an unsupported argument.
        TypeError, ValueError: shapes, dtypes or devices disagree.
    """
    extra = {
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    for name, x in extra.items():
        if x is not None:
            raise NotImplementedError(f"{name} is not supported by fastattn.compat.flash_mla")
    checks.check_input("q", q, "", "B T_q H_q D", q, {})
    checks.check_input("k_cache", k_cache, "", "P S H_k D", k_cache, {})
    (B, T_q, H_q, D), D_v = q.shape, checks.check_count("head_dim_v", head_dim_v, 1)
    if indices is not None:
        if causal:
            raise ValueError("causal must be False with indices, got True")
        k_cache, block_table, cache_seqlens = _chosen(k_cache, indices, topk_length)
        q = q.flatten(0, 1).unsqueeze(1)
    pages = k_cache.transpose(1, 2)
    lengths = checks.check_tensor("cache_seqlens", cache_seqlens)
    if is_fp8_kvcache:
        view = view_of_records(pages, D_v, lengths, block_table)
    else:
        view = view_of_tensors(pages, pages[..., :D_v], lengths, block_table=block_table)
    if view.head_dim != D or D_v > D:
        raise ValueError(
            f"k_cache must have q's {D} columns, of which head_dim_v={D_v} are the value, "
            f"got {view.head_dim}"
        )
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    o, lse = decode_attention(q.transpose(1, 2), view, causal=causal, scale=scale, return_lse=True)
    if attn_sink is not None:
        checks.check_input("attn_sink", attn_sink, "", "H_q", q, {"H_q": H_q})
        o, _ = with_column(o, lse, attn_sink)
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)  # of each row, or with indices of each token
    return o.reshape(B, T_q, H_q, D_v).contiguous(), lse.reshape(B, T_q, H_q).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, None, Tensor]:
    """Attend from a prompt's tokens to selected latents: DeepSeek's sparse attention.

    `flash_mla_with_kvcache` with indices, without a batch dimension. No gradient.

    Args:
        q: [T_q, H_q, D], such as 512 + 64 columns, absorbed.
        kv: [T_k, 1, D] in q's dtype, whose first d_v columns are the values.
        indices: int32 [T_q, 1, n]: a latent each; a number that is none, such as -1, names none.
            One named twice counts twice.
        sm_scale: the model's scale before absorption: (128 + 64) ** -0.5 times YaRN's factor.
        d_v: D_v.
        attn_sink: float [H_q], the score of one more key of value 0, not included in the lse.
        topk_length: int32 [T_q]: how many of a token's indices count, from their start.

    Returns:
        o [T_q, H_q, D_v], None in place of FlashMLA's largest scores, and lse, fp32 [T_q, H_q],
        natural log; 0 and -inf without a key.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices disagree.
    """
    sizes: checks.Sizes = {}
    for name, x, dims in (("q", q, "T_q H_q D"), ("kv", kv, "T_k 1 D")):
        checks.check_input(name, x, "", dims, x, sizes)
    checks.check_input("indices", indices, "integer", "T_q 1 n", q, sizes)
    o, lse = flash_mla_with_kvcache(
        q.unsqueeze(1), kv.unsqueeze(0), None, None, d_v, softmax_scale=sm_scale, indices=indices,
        attn_sink=attn_sink, topk_length=topk_length,
    )  # fmt: skip
    return o.squeeze(1), None, lse.squeeze(2).contiguous()


def _chosen(
    k_cache: Tensor, indices: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The cache in pages of one token, and for each query the table and number of its own."""
    P, S = k_cache.shape[:2]
    sizes: checks.Sizes = {}
    checks.check_input("indices", indices, "integer", "B T_q n", indices, sizes)
    pitch, rest = divmod(k_cache.stride(0), max(k_cache.stride(1), 1)) if P > 1 else (S, 0)
    if rest:
        raise ValueError(
            f"k_cache must have pages a whole number of slots apart, got strides {k_cache.stride()}"
        )
    n = indices.shape[2]
    named = (indices >= 0) & (indices < P * S)
    if counts is not None:
        checks.check_input("topk_length", counts, "integer", "B", k_cache, sizes)
        named &= torch.arange(n, device=named.device) < counts[:, None, None]
    # Those that name a latent in front.
    order = named.int().argsort(dim=-1, descending=True, stable=True)
    table = indices.gather(-1, order).flatten(0, 1)
    if pitch != S > 0:
        table = table // S * pitch + table % S
    slots = k_cache.as_strided(((P - 1) * pitch + S, *k_cache.shape[2:]), k_cache.stride()[1:])
    return slots.unsqueeze(1), table, named.sum(-1, dtype=torch.int32).flatten()
