"""From the keyword arguments of a call to its `Options`, every one of them checked."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks, score_checks
from ..options import Options, ScoreArguments, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Names of the arguments that dense and packed calls share.
SHARED = ScoreArguments.__annotations__.keys()


def dense_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    *shared: Any,
    **named: "Unpack[ScoreArguments]",
) -> Options:
    """The options of one call of `attention`, after `checks.check_tensors`.

    The arguments of `ScoreArguments` follow in its order, or by name: by position the host is
    several times as fast.
    """
    checks.check_qkv(q, k, v)
    query_offset, query_offsets = _query_offset(query_offset, q, k)
    if key_padding_mask is not None:
        checks.check_key_padding_mask(key_padding_mask, k)
    if attn_mask is not None:
        attn_mask, attn_bias = checks.check_attn_mask(attn_mask, attn_bias, q, k)
    if attn_bias is not None:
        checks.check_floats("attn_bias", attn_bias)
        attn_bias = checks.check_per_score("attn_bias", attn_bias, q, k)
    q_documents = k_documents = None
    if documents is not None:
        q_documents, k_documents = checks.check_documents(documents, q, k)
    return _options(
        q, k, v, q.shape[0], key_padding_mask, query_offset, query_offsets, q_documents,
        k_documents, attn_mask, attn_bias, None, None, *shared, **named,
    )  # fmt: skip


def fp8_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offset: int | Tensor | None = None,
    **shared: "Unpack[ScoreArguments]",
) -> Options:
    """The options of one call of `attention_fp8`, whose dtypes and devices have been checked."""
    checks.check_shapes(q, k, v)
    query_offset, query_offsets = _query_offset(query_offset, q, k)
    return _options(
        q, k, v, q.shape[0], None, query_offset, query_offsets, None, None, None, None, None, None,
        **shared,
    )  # fmt: skip


def _query_offset(
    query_offset: int | Tensor | None, q: Tensor, k: Tensor
) -> tuple[int, Tensor | None]:
    """As an int, or 0 and one for each batch row."""
    if query_offset is None:
        offset = k.shape[2] - q.shape[2]
        if isinstance(offset, Tensor):
            # torch.jit.trace records sizes as tensors, and would take an int for a constant.
            return 0, offset.to(q.device).expand(q.shape[0])
        return offset, None
    query_offset = checks.check_query_offset(query_offset, q)
    return (0, query_offset) if isinstance(query_offset, Tensor) else (query_offset, None)


# What a packed call cannot have, and what takes its place.
_NOT_PACKED = {
    "key_padding_mask": "key_lengths [N] says how many keys of each sequence exist",
    "documents": "cu_seqlens separates the sequences",
    "attn_mask": "mask_mod computes a mask inside the kernels",
    "attn_bias": "relative_bias and score_mod compute a bias inside the kernels",
    "query_offset": "the last query of each sequence stands at its last key",
}


def packed_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    refused: dict[str, Any],
    **shared: "Unpack[ScoreArguments]",
) -> Options:
    """The options of one call of `attention_varlen`, after `checks.check_packed`.

    refused: keyword arguments that it does not take.
    """
    for name in refused:
        reason = _NOT_PACKED.get(name, "there is no such argument")
        raise TypeError(f"attention_varlen takes no {name}: {reason}")
    checks.check_packed_qkv(q, k, v)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], q)
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"cu_seqlens_k must be given where k and q differ in length, got {k.shape[0]} keys "
                f"and {q.shape[0]} queries"
            )
        cu_seqlens_k = cu_seqlens_q
    else:
        checks.check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], q)
        checks.check_placement("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), q)
    return _options(
        q, k, v, cu_seqlens_q.shape[0] - 1, None, None, None, None, None,
        None, None, cu_seqlens_q, cu_seqlens_k, **shared,
    )  # fmt: skip


# What a call over a cache cannot have, and what takes its place.
_NOT_CACHED = {
    "key_lengths": "the cache knows the lengths of its rows",
    "key_padding_mask": "the cache's starts say where rows are padded",
    "query_offset": "the last query of each row stands at its last key",
    "prefix_lengths": "new tokens stand behind every prefix",
    "documents": "a row of a cache is one document; attn_mask and mask_mod hide parts of it",
    "relative_keys": "there is no kernel for them",
    "relative_query": "there is no kernel for relative keys",
    "score_mod_grad": "there are no gradients",
    "dropout": "there is no training from a cache",
    "dropout_seed": "there is no training from a cache",
    "deterministic": "there are no gradients",
}


def cache_options(q: Tensor, k: Tensor, v: Tensor, bound: int, options: dict[str, Any]) -> Options:
    """The options of one call of `decode_attention`.

    Args:
        q: [B, H_q, T_q, D].
        k, v: [P, H_k, S, D or D_v], the cache's.
        bound: positions that a mask or bias has to reach over.
        options: keyword arguments. Causal unless they say otherwise.
    """
    shared = {"causal": True, **options}
    attn_mask = shared.pop("attn_mask", None)
    attn_bias = shared.pop("attn_bias", None)
    for name in shared:
        if name in _NOT_CACHED or name not in SHARED:
            reason = _NOT_CACHED.get(name, "there is no such argument")
            raise TypeError(f"decode_attention takes no {name}: {reason}")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a bool tensor, got {checks.kind(attn_mask)}")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool (True = attend), got {attn_mask.dtype}")
    if attn_mask is not None:
        attn_mask = checks.check_per_position("attn_mask", attn_mask, q, bound)
    if attn_bias is not None:
        checks.check_floats("attn_bias", attn_bias)
        attn_bias = checks.check_per_position("attn_bias", attn_bias, q, bound)
    return _options(
        q, k, v, q.shape[0], None, 0, None, None, None, attn_mask, attn_bias, None, None, **shared
    )


def _options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    B: int,
    key_padding_mask: Tensor | None,
    query_offset: int | None,
    query_offsets: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool = False,
    window: Window = None,
    prefix_lengths: int | Tensor | None = None,
    keep_first: int = 0,
    stride: int | None = None,
    mask_mod: Any = None,
    mod_tensors: tuple[Tensor, ...] = (),
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_keys: Tensor | None = None,
    relative_query: Tensor | None = None,
    score_mod: Any = None,
    score_mod_grad: Any = None,
    sinks: Tensor | None = None,
    dropout: float = 0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
) -> Options:
    """Check what dense and packed calls share, and put all into one record.

    Each call on a GPU waits for this: what was not given costs one comparison.
    """
    H_q, H_k = q.shape[1], k.shape[1]
    causal = checks.check_flag("causal", causal)
    left, right = checks.check_window(window)
    if key_lengths is not None:
        checks.check_key_lengths(key_lengths, B, q)
    if prefix_lengths is not None:
        prefix_lengths = checks.check_prefix_lengths(prefix_lengths, B, causal, q)
    if stride is not None:
        stride = checks.check_count("stride", stride, 1)
    if type(keep_first) is not int or keep_first:
        windowed = left is not None or right is not None or stride is not None
        keep_first = checks.check_keep_first(keep_first, windowed)
    if softcap is not None:
        softcap = checks.check_positive("softcap", softcap)
    if alibi_slopes is not None:
        score_checks.check_alibi_slopes(alibi_slopes, B, H_q, q)
    if relative_bias is not None:
        score_checks.check_relative_bias(relative_bias, H_q, q)
    if relative_keys is not None:
        score_checks.check_relative_keys(relative_keys, H_k, q)
    if relative_query is not None:
        score_checks.check_relative_query(relative_query, relative_keys, q)
    if sinks is not None:
        score_checks.check_sinks(sinks, H_q, q)
    if not isinstance(mod_tensors, tuple) or mod_tensors:
        used = mask_mod is not None or score_mod is not None
        score_checks.check_mod_tensors(mod_tensors, q, used)
    if mask_mod is not None:
        score_checks.check_mask_mod(mask_mod, len(mod_tensors))
    if score_mod is not None or score_mod_grad is not None:
        score_checks.check_score_mods(score_mod, score_mod_grad, len(mod_tensors))
        inputs = (q, k, v, attn_bias, relative_bias, relative_keys, relative_query, sinks)
        score_checks.check_score_mod_gradient(score_mod_grad, inputs)
    if type(dropout) is not int or dropout:
        dropout = score_checks.check_dropout(dropout)
    if dropout_seed is not None:
        score_checks.check_dropout_seed(dropout_seed, q)
    if deterministic is not True:
        deterministic = checks.check_flag("deterministic", deterministic)
    # By position, in the order of the fields, for speed.
    return Options(
        key_padding_mask,
        key_lengths,
        query_offsets,
        prefix_lengths,
        q_documents,
        k_documents,
        attn_mask,
        alibi_slopes,
        dropout_seed if dropout else None,
        cu_seqlens_q,
        cu_seqlens_k,
        attn_bias,
        relative_bias,
        relative_keys,
        relative_query,
        sinks,
        mod_tensors,
        query_offset,
        left,
        right,
        causal,
        keep_first,
        stride,
        checks.check_scale(scale, q.shape[-1]),
        softcap,
        dropout,
        not deterministic,
        mask_mod,
        score_mod,
        score_mod_grad,
    )
