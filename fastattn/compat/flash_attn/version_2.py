"""flash-attn 2's functions, which also take the arguments of versions 3 and 4.

    from fastattn.compat.flash_attn import flash_attn_func
    fastattn.compat.flash_attn.install()    # after this, `import flash_attn` finds these functions

Layouts and defaults are flash-attn's: q [B, T_q, H_q, D], window_size of neighbours on each side
with -1 = all, causal aligned to the last key, softcap 0.0 = none. Beyond flash-attn, these serve
fp32, any head dim up to 256, D_v != D, and dropout with softcap. Contradictory arguments raise
RuntimeError, as in flash-attn; unsupported ones NotImplementedError. `version_3` and `version_4`
have the argument order of versions 3 and 4.

Two results differ from flash-attn's: the lse of a query without
keys is -inf, not inf, and the lse of a causal call with ALiBi counts distances, not columns.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ...functional.fp8 import attention_fp8, attention_varlen_fp8
from ...functional.fused_attention import attention, attention_varlen
from . import packed
from .conventions import (
    Result,
    Window,
    checked,
    e4m3_scales,
    errors_of_flash_attn,
    one_of,
    options_of,
    refuse,
    returned,
    second_product,
)
from .kvcache import Cache, append_and_attend

__version__ = "2.8.3"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# Untyped, as the overloads take only a literal return_lse.
_dense: Any = attention
_packed: Any = attention_varlen
_dense_fp8: Any = attention_fp8
_packed_fp8: Any = attention_varlen_fp8


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **newer: Any,
) -> Result:
    """Attend from q [B, T_q, H_q, D] to k [B, T_k, H_k, D] and v [B, T_k, H_k, D_v].

    Args:
        dropout_p: probability to drop a weight; pass 0.0 for evaluation.
        softmax_scale: factor on the products; default D ** -0.5.
        causal: the last query sees every key, the one before all but the last, and so on.
        window_size: (left, right) neighbours of a query's position T_k - T_q + i; -1 or None = all.
        softcap: bound of the scores; 0.0 = none.
        alibi_slopes: fp32 [H_q] or [B, H_q]: -slope * |T_k - T_q + i - j| is added to the scores.
        deterministic: accepted; gradients are always deterministic. `fastattn.attention(...,
            deterministic=False)` has the backward with atomics.
        return_attn_probs: return (o, lse, None). flash-attn's third result is for its own tests.
        learnable_sink: version 4: [H_q], the score of one more key with value 0.
        return_lse: version 4: return (o, lse).
        newer: arguments of versions 3 and 4 that change nothing, at their defaults; their qv [B,
            T_q, H_q, D_v], with scores q k + qv v and a scale of (D + D_v) ** -0.5; and version 3's
            q_descale, k_descale and v_descale, fp32 [B, H_k], with q, k and v in float8_e4m3fn:
            `fastattn.attention_fp8` serves them, o in bfloat16, without gradients.

    Returns:
        o [B, T_q, H_q, D_v]; lse is fp32 [B, H_q, T_q]. Differentiable.

    Raises:
        RuntimeError: shapes or dtypes disagree, or an option is out of range.
        NotImplementedError: an unsupported argument of versions 3 and 4.
    """
    heads_first = [checked(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v))]
    scales = e4m3_scales(q, k, newer, q.shape[0])
    qv = newer.pop("qv", None) if scales is None else None
    refuse(newer)
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_attn_probs or return_lse
    attend = _dense if scales is None else partial(_dense_fp8, **scales)
    if q.shape[1] > k.shape[1]:  # given, as the default warns of this layout
        options["query_offset"] = k.shape[1] - q.shape[1]
    options |= second_product(qv, q, v, options, 2)
    with errors_of_flash_attn():
        result = attend(*(x.transpose(1, 2) for x in heads_first), return_lse=with_lse, **options)
    return returned(result, with_lse, return_attn_probs, lambda o: o.transpose(1, 2))


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` with k and v in kv [B, T_k, 2, H_k, D]."""
    k, v = checked("kv", kv, 5, (2, 2)).unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` with q, k and v in qkv [B, T, 3, H, D]."""
    q, k, v = checked("qkv", qkv, 5, (2, 3)).unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **newer: Any,
) -> Result:
    """Attend within each of N packed sequences.

    Args:
        q: [total_q, H_q, D].
        k: [total_k, H_k, D]; with block_table pages [P, page_size, H_k, D], without gradients.
        v: likewise with D_v.
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], offsets of the sequences and the total.
            cu_seqlens_k may be None with a block_table and seqused_k.
        max_seqlen_q: needed only with a block_table.
        max_seqlen_k: not needed.
        block_table: int32 [N, pages of a sequence]; page_table in version 3 and 4.
        seqused_k: int32 [N], version 3: number of keys of each sequence to use. Positions count
            from the last of these. Without a block_table, causal, a window or ALiBi copy the keys
            and wait for the device.
        dropout_p, softmax_scale, causal, window_size, softcap: as for `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: likewise.
        learnable_sink, return_lse, newer: likewise.
        seqused_q: not supported.

    Returns:
        o [total_q, H_q, D_v]; lse is fp32 [H_q, total_q].

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    block_table = one_of("block_table", block_table, "page_table", page_table)
    scales = None
    if block_table is None:
        scales = e4m3_scales(q, k, newer, cu_seqlens_q.shape[0] - 1)
    qv = newer.pop("qv", None) if scales is None and block_table is None else None
    refuse({**newer, "seqused_q": seqused_q})
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_attn_probs or return_lse
    if block_table is not None:
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
        if seqused_k is None or max_seqlen_q is None:
            raise RuntimeError("block_table needs max_seqlen_q, and cu_seqlens_k or seqused_k")
        with errors_of_flash_attn():
            options |= {"max_seqlen_q": max_seqlen_q, "return_lse": with_lse}
            pages = {"lengths": seqused_k, "block_table": block_table}
            result = packed.attend_packed(q, k, v, cu_seqlens_q, **pages, **options)
    else:
        if cu_seqlens_k is None:
            raise RuntimeError("cu_seqlens_k must be given without a block_table")
        placed = options["causal"] or "window" in options or "alibi_slopes" in options
        with errors_of_flash_attn():
            if seqused_k is not None and placed:
                k, v, cu_seqlens_k = packed.used_keys(k, v, cu_seqlens_k, seqused_k)
            elif seqused_k is not None:
                options["key_lengths"] = seqused_k
            attend = _packed if scales is None else partial(_packed_fp8, **scales)
            options |= second_product(qv, q, v, options, 1)
            result = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=with_lse, **options)
    return returned(result, with_lse, return_attn_probs, lambda o: o)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_varlen_func` with k and v in kv [total_k, 2, H_k, D]."""
    k, v = checked("kv", kv, 4, (1, 2)).unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in qkv [total, 3, H, D]."""
    q, k, v = checked("qkv", qkv, 4, (1, 3)).unbind(1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    **newer: Any,
) -> Result:
    """Write k and v into a cache, in place, and attend to it.

    Args:
        q: [B, T_q, H_q, D].
        k_cache: [B_c, S, H_k, D], or with block_table pages [P, page_size, H_k, D]; contiguous.
        v_cache: likewise with D_v.
        k, v: [B, T_new, H_k, D or D_v]: written from position cache_seqlens on. Tokens past the end
            of the row are skipped where lengths are a tensor, and refused otherwise.
        rotary_cos, rotary_sin: [positions, R / 2]: k is rotated to positions from cache_seqlens on,
            whatever cache_leftpad is. q is rotated likewise with causal or a window, otherwise all
            of it to position cache_seqlens.
        cache_seqlens: tokens of each row in the cache, an int or int32 [B]; default: all. Needed
            with k and v. Not modified.
        cache_batch_idx: int32 [B], the row of the cache of each batch row.
        cache_leftpad: int32 [B], start of each row in the cache; earlier tokens are masked.
        block_table: int32 [B, pages of a row]; page_table in versions 3 and 4.
        rotary_interleaved: channels 2 i and 2 i + 1 are a pair (GPT-J), else i and i + R / 2.
        num_splits: parts that the keys are split into; 0 = enough to fill the GPU.
        return_softmax_lse, return_lse: also return lse, fp32 [B, H_q, T_q].
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, newer: as for
            `flash_attn_func`.

    Returns:
        o [B, T_q, H_q, D_v], or (o, lse). There are no gradients.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    qv = newer.pop("qv", None)
    refuse(newer)
    options = options_of(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_softmax_lse or return_lse
    cache = Cache(
        checked("k_cache", k_cache, 4),
        checked("v_cache", v_cache, 4),
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        one_of("block_table", block_table, "page_table", page_table),
    )
    named = {"k": k, "v": v, "qv": qv, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    with errors_of_flash_attn():
        for name, x in named.items():
            if x is not None:
                checked(name, x, 2 if name.startswith("rotary") else 4)
        result = append_and_attend(
            checked("q", q, 4),
            cache,
            new=(k, v),
            rotary=(rotary_cos, rotary_sin),
            interleaved=rotary_interleaved,
            options=options,
            num_splits=num_splits or None,
            return_lse=with_lse,
            qv=qv,
        )
    return returned(result, with_lse, False, lambda o: o.transpose(1, 2))
