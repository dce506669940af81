"""The functions of the flash-attn package, version 2, with the spellings of 3 and 4 beside them.

    from fastattn.compat.flash_attn import flash_attn_func
    fastattn.compat.flash_attn.install()    # after this, `import flash_attn` finds these functions

Layouts and defaults are flash-attn's: q [B, T_q, H_q, D], window_size of neighbours on each side
with -1 = all, causal aligned to the last key, softcap 0.0 = none. More is served than there: fp32,
any head dim up to 256, D_v other than D, dropout beside softcap. Arguments that contradict each
other raise RuntimeError, as they do there. What is not served raises NotImplementedError.

Two results differ where flash-attn's are an accident of its kernels: the lse of a query that sees
no key is -inf, not inf, and that of a causal call with ALiBi counts distances, not columns.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..functional import attention, attention_varlen
from . import bert_padding, flash_attn_cache, foreign_module

__version__ = "2.8.3"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

Window = tuple[int | None, int | None]
Result = Any  # o, or (o, lse, None), or (o, lse): the caller's flags say which

# Their overloads want return_lse as a literal.
_dense: Any = attention
_packed: Any = attention_varlen

# Arguments of versions 3 and 4 that leave the result as it is, and others at which they do so.
_WITHOUT_EFFECT = frozenset(("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"))
_NEUTRAL: dict[str, Any] = {
    "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0,
    "score_mod": None, "score_mod_bwd": None, "mask_mod": None, "aux_tensors": None,
    "aux_scalars": None, "block_sparse_tensors": None, "block_sparse_tensors_bwd": None,
    "gather_kv_indices": None, "rotary_seqlens": None, "seqused_q": None,
    "cu_seqlens_q": None,
}  # fmt: skip


@contextmanager
def _errors_of_flash_attn() -> Iterator[None]:
    """RuntimeError for tensors that do not fit, which is what flash-attn's checks raise."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error


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
    """Attention of q [B, T_q, H_q, D] to k [B, T_k, H_k, D] and v [B, T_k, H_k, D_v].

    Args:
        dropout_p: probability to drop a weight; pass 0.0 for evaluation.
        softmax_scale: factor on the products; default D ** -0.5.
        causal: the last query sees every key, the one before all but the last, and so on.
        window_size: (left, right) neighbours of a query's position T_k - T_q + i; -1 or None = all.
        softcap: bound of the scores; 0.0 = none.
        alibi_slopes: fp32 [H_q] or [B, H_q]: -slope * |T_k - T_q + i - j| is added to the scores.
        deterministic: accepted; gradients are the same from run to run in any case. The backward
            with atomics is that of `fastattn.attention(..., deterministic=False)`.
        return_attn_probs: return (o, lse, None). The probabilities that flash-attn returns third
            are for its own tests of dropout.
        learnable_sink: version 4: [H_q], the score of one more key with value 0.
        return_lse: version 4: return (o, lse).
        newer: arguments of versions 3 and 4 that change nothing, at their defaults.

    Returns:
        o [B, T_q, H_q, D_v]; lse is fp32 [B, H_q, T_q]. Differentiable.

    Raises:
        RuntimeError: shapes or dtypes disagree, or an option is out of range.
        NotImplementedError: an argument of versions 3 and 4 that is not served.
    """
    _refuse(newer)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_attn_probs or return_lse
    heads_first = [_checked(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v))]
    with _errors_of_flash_attn():
        found = _dense(*(x.transpose(1, 2) for x in heads_first), return_lse=with_lse, **options)
    return _returned(found, with_lse, return_attn_probs, lambda o: o.transpose(1, 2))


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` with k and v in kv [B, T_k, 2, H_k, D]."""
    k, v = _checked("kv", kv, 5, (2, 2)).unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_func` with q, k and v in qkv [B, T, 3, H, D]."""
    q, k, v = _checked("qkv", qkv, 5, (2, 3)).unbind(2)
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
    """Attention inside each of N sequences that lie behind one another.

    Args:
        q: [total_q, H_q, D].
        k: [total_k, H_k, D]; with block_table pages [P, page_size, H_k, D], without gradients.
        v: likewise with D_v.
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], where each sequence starts, and the total.
            cu_seqlens_k may be None with a block_table and seqused_k.
        max_seqlen_q: needed with a block_table alone.
        max_seqlen_k: not needed.
        block_table: int32 [N, pages of a sequence]; page_table in version 3 and 4.
        seqused_k: int32 [N], version 3: how many keys of each sequence count.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, learnable_sink, return_lse, newer: as for `flash_attn_func`.
        seqused_q: not served.

    Returns:
        o [total_q, H_q, D_v]; lse is fp32 [H_q, total_q].

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    _refuse({**newer, "seqused_q": seqused_q})
    block_table = _one_of("block_table", block_table, "page_table", page_table)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_attn_probs or return_lse
    if block_table is not None:
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
        if seqused_k is None or max_seqlen_q is None:
            raise RuntimeError("block_table needs max_seqlen_q, and cu_seqlens_k or seqused_k")
        with _errors_of_flash_attn():
            found = flash_attn_cache.attend_packed(
                q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, block_table, options, with_lse
            )
    else:
        if cu_seqlens_k is None:
            raise RuntimeError("cu_seqlens_k must be given without a block_table")
        if seqused_k is not None:
            options["key_lengths"] = seqused_k
        with _errors_of_flash_attn():
            found = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=with_lse, **options)
    return _returned(found, with_lse, return_attn_probs, lambda o: o)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """`flash_attn_varlen_func` with k and v in kv [total_k, 2, H_k, D]."""
    k, v = _checked("kv", kv, 4, (1, 2)).unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in qkv [total, 3, H, D]."""
    q, k, v = _checked("qkv", qkv, 4, (1, 3)).unbind(1)
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
    """Attention of new tokens to a cache, which k and v are written into first, in place.

    Args:
        q: [B, T_q, H_q, D].
        k_cache: [B_c, S, H_k, D], or with block_table pages [P, page_size, H_k, D]; contiguous.
        v_cache: likewise with D_v.
        k, v: [B, T_new, H_k, D or D_v]: written at positions cache_seqlens and on.
        rotary_cos, rotary_sin: [positions, R / 2]: k is rotated before it is written. q is rotated
            likewise with causal or a window, and else as if all of it stood at cache_seqlens.
        cache_seqlens: tokens of each row in the cache, an int or int32 [B]; default all of it.
            Needed with k and v. It is not changed.
        cache_batch_idx: int32 [B], the row of the cache of each batch row.
        cache_leftpad: int32 [B], where in the cache a row starts. Positions count from there.
        block_table: int32 [B, pages of a row]; page_table in versions 3 and 4.
        rotary_interleaved: channels 2 i and 2 i + 1 are a pair (GPT-J), else i and i + R / 2.
        num_splits: into how many parts keys are split; 0 = as many as fill the GPU.
        return_softmax_lse, return_lse: also return lse, fp32 [B, H_q, T_q].
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, newer: as for
            `flash_attn_func`.

    Returns:
        o [B, T_q, H_q, D_v], or (o, lse). There are no gradients.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    _refuse(newer)
    options = _options(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink
    )
    with_lse = return_softmax_lse or return_lse
    cache = flash_attn_cache.Cache(
        _checked("k_cache", k_cache, 4),
        _checked("v_cache", v_cache, 4),
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        _one_of("block_table", block_table, "page_table", page_table),
    )
    with _errors_of_flash_attn():
        found = flash_attn_cache.append_and_attend(
            _checked("q", q, 4), cache, (k, v), (rotary_cos, rotary_sin), rotary_interleaved,
            options, num_splits or None, with_lse,
        )  # fmt: skip
    return _returned(found, with_lse, False, lambda o: o.transpose(1, 2))


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Options of `fastattn.attention`, those that are not given left out."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    given = {
        "window": None if left is None and right is None else (left, right),
        "dropout": dropout_p or None,
        "scale": softmax_scale,
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    return {"causal": bool(causal), **{name: x for name, x in given.items() if x is not None}}


def _refuse(newer: dict[str, Any]) -> None:
    """Raise for arguments of other versions that would change the result, and for unknown ones."""
    for name, x in newer.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        neutral = _NEUTRAL[name]
        if x is not None and (neutral is None or x != neutral):
            raise NotImplementedError(
                f"{name} is not served by fastattn.compat.flash_attn; fastattn.attention has masks "
                "and scores of one's own"
            )


def _one_of(name: str, x: Tensor | None, other: str, y: Tensor | None) -> Tensor | None:
    if x is not None and y is not None:
        raise RuntimeError(f"{name} and {other} are two names of one argument, got both")
    return y if x is None else x


def _checked(name: str, x: Tensor, dims: int, packed: tuple[int, int] | None = None) -> Tensor:
    """x, which has `dims` dims, the one named by packed[0] of size packed[1]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != dims:
        raise RuntimeError(f"{name} must have {dims} dimensions, got {list(x.shape)}")
    if packed is not None and x.shape[packed[0]] != packed[1]:
        raise RuntimeError(
            f"{name} must have size {packed[1]} in dim {packed[0]}, got {list(x.shape)}"
        )
    return x


def _returned(
    found: Any, with_lse: bool, triple: bool, layout: Callable[[Tensor], Tensor]
) -> Result:
    """What flash-attn returns for these flags."""
    if not with_lse:
        return layout(found).contiguous()
    o, lse = found
    return (layout(o).contiguous(), lse, None) if triple else (layout(o).contiguous(), lse)


def install() -> None:
    """Make `import flash_attn` find these functions, in this process, until `uninstall`.

    flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding resolve. Modules of the
    real package that were imported before are put aside; code that took functions from them keeps
    those.
    """
    this = sys.modules[__name__]
    foreign_module.install(
        "flash_attn", {"": this, "flash_attn_interface": this, "bert_padding": bert_padding}
    )


def uninstall() -> None:
    """Undo `install`: what was imported before is back. Nothing happens if it is not in force."""
    foreign_module.uninstall("flash_attn")
