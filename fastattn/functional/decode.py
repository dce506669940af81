"""Attention of a few new tokens to a cache, as a function: check, choose a backend, call it."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .. import checks, dispatch
from ..cache.views import view_of_cache
from ..cache_view import CacheView
from ..dispatch import Explanation
from ..ops import decode as decode_ops
from ..options import Options
from ..torch_backend import decode as decode_torch
from ..tuned import choices
from . import call_memo, call_options, sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import DecodeAttentionArguments


@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    batch_invariant: bool = ...,
    return_lse: Literal[False] = ..., backend: str | None = ...,
    **options: "Unpack[DecodeAttentionArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    batch_invariant: bool = ...,
    return_lse: Literal[True], backend: str | None = ...,
    **options: "Unpack[DecodeAttentionArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    batch_invariant: bool = ...,
    return_lse: bool, backend: str | None = ...,
    **options: "Unpack[DecodeAttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@call_options.CACHE.sign
def decode_attention(
    q: Tensor,
    cache: Any,
    *,
    new_lengths: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest T_q tokens of every row of a cache to all that the row holds.

    Their keys and values are in the cache already: token i of row b has position
    lengths[b] - T_q + i. With T_q = 2 and causal, rows of 3 and 5 tokens in a cache of 6 (1 = seen,
    . = no token):

        row 0   1 1 0 . . .        row 1   1 1 1 1 0 .
                1 1 1 . . .                1 1 1 1 1 .

    The lengths are read on the device, so that a CUDA graph of this call serves rows that grow. On
    a GPU the keys are split among programs and the parts merged in the order of the keys: the
    result is the same from run to run.

    Kernels are compiled for keys that are split and for keys that are not, which num_splits says or
    the batch and the room in the cache decide, and for T_q H_q / H_k up to 16 and above; for no
    other size. `fastattn.warmup` compiles them all.

    Args:
        q: [B, H_q, T_q, D] in the cache's dtype, any strides. Query head h reads K/V head
            h // (H_q // H_k). Or a DTensor sharded by rows or heads, whose part on a rank belongs
            to that rank's cache.
        cache: a `KVCache`; a `PagedKVCache`, whose rows in use are then the batch, oldest first; or
            a `CacheView` of either, or of tensors (`view_of_tensors`). Rows shorter than T_q have
            queries before their first token; if causal, these see nothing. A ring brings
            its window and first positions with it, and T_q is at most its max_step.
        new_lengths: int32 or int64 [B], taken within [0, T_q], as the cache's `append` was given
            it: only the first new_lengths[b] queries of row b are tokens. Token i is at
            lengths[b] - new_lengths[b] + i then; what comes out for the others is unspecified,
            though finite. None: all T_q count.
        num_splits: into how many parts the keys of a row are split. Default: as many as keep the
            GPU busy, by the batch, the heads and the room in the cache. The result depends on it
            in the last bits.
        batch_invariant: split the keys by positions instead, every 512 of them, wherever they are
            kept. A row's result is then the same to the bit alone and in any batch, in a cache of
            any size. The price: parts are always written and merged, which one long row in a small
            batch has anyway and a large batch could have done without; a few long rows are split
            less finely than a large GPU could serve them.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto" (default; FASTATTN_BACKEND replaces it);
            `explain_decode` tells which one serves. torch holds a copy of what it reads unless the
            cache is a plain one.
        options: causal (here default True), window, keep_first, stride, mask_mod, mod_tensors,
            scale, softcap, alibi_slopes, relative_bias, score_mod and sinks mean what they mean to
            `fastattn.attention`, as do attn_mask and attn_bias, whose last dim counts positions
            from 0 and reaches as far as any row does.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log, the sink counted. A query that sees no key has o = 0 and lse = -inf (or its sink).
        Unused slots and pages never reach them, not even their NaN.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call.
        RuntimeError: an input requires grad while grad mode is on: a cache has no gradients.
    """
    if type(return_lse) is not bool:
        return_lse = checks.check_flag("return_lse", return_lse)
    view, uniform = view_of_cache(cache)
    given = {
        "new_lengths": new_lengths,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
        **options,
    }
    key = with_cache(call_memo.key_of((q,), given, backend), q, view, given)
    known = call_memo.find(key)
    if known is not None:
        o, lse = known.run(q, view, new_lengths, known.options_of(given))
        return (o, lse) if return_lse else o
    if key is None and sharded.is_dtensor(q):
        part = partial(
            decode_attention,
            cache=cache,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            return_lse=return_lse,
            backend=backend,
        )
        result: Any = sharded.attend(part, {"q": q}, {"new_lengths": new_lengths, **options})
        return result
    num_splits, batch_invariant = _splits(num_splits, batch_invariant)
    checked = _checked(q, view, new_lengths, options)
    choice = dispatch.choose(in_tiles(q, view), view.k, view.v, checked, backend, family="decode")
    dispatch.log_once("decode_attention", choice, q, view.k, view.v, checked)
    with torch.no_grad():
        if choice.backend == "torch":
            if not q.is_cpu:
                dispatch.warn_if_slow(choice, q.device)
            return decode_torch.attend(q, view, new_lengths, checked, return_lse, uniform)
        call = (q, view, new_lengths, checked, num_splits, batch_invariant)
        given = {name: x for name, x in given.items() if name != "new_lengths"}
        call_memo.keep(key, q, given, checked, partial(decode_ops.prepare, *call))
        o, lse = decode_ops.attend(*call)
    return (o, lse) if return_lse else o


def attend_to_part(
    q: Tensor,
    cache: Any,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`decode_attention` for `merge`: of q in fp64, which torch alone serves, lse is fp64 too.

    Rounded to fp32, an lse of 1e4 would change the weights of a part by 5e-4.
    """
    if q.dtype != torch.float64 or sharded.is_dtensor(q):
        options = {"num_splits": num_splits, "batch_invariant": batch_invariant, **options}
        return decode_attention(q, cache, return_lse=True, backend=backend, **options)
    view, uniform = view_of_cache(cache)
    _splits(num_splits, batch_invariant)
    checked = _checked(q, view, None, options)
    dispatch.choose(in_tiles(q, view), view.k, view.v, checked, backend, family="decode")
    with torch.no_grad():
        wide = checked._replace(fp32_results=True)
        o, lse = decode_torch.attend(q, view, None, wide, True, uniform)
    return o, lse


@call_options.CACHE.sign
def explain_decode(
    q: Tensor,
    cache: Any,
    *,
    new_lengths: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[DecodeAttentionArguments]",
) -> Explanation:
    """Which backend `decode_attention` would use for these arguments, and why not a faster one.

    Checks the arguments as `decode_attention` does, and computes nothing.
    """
    view, _ = view_of_cache(cache)
    _splits(num_splits, batch_invariant)
    checked = _checked(q, view, new_lengths, dict(options))
    choice = dispatch.choose(in_tiles(q, view), view.k, view.v, checked, backend, family="decode")
    return dispatch.with_findings(choice, q, view.v, ("decode",))


def with_cache(
    key: list[Any] | None, q: Tensor, view: CacheView, given: dict[str, Any]
) -> list[Any] | None:
    """key, and what the checks and the launch look at of a cache. Its length the device knows."""
    if key is None:
        return None
    key += (view.page_size, view.keep_first, view.window, view.dtype)
    key.append(decode_ops.one_memory(view.k, view.v, view.k_scale))
    if "attn_mask" in given or "attn_bias" in given:  # which have to reach as far
        key.append(view.length_bound)
    tensors = (view.k, view.v, view.lengths, view.k_scale, view.v_scale, view.block_table)
    for x in (*tensors, view.starts, view.batch_index):
        if x is not None and x.is_neg():
            return None
        key.append(None if x is None else call_memo.layout(x))
    key += (q.data_ptr() & 15 == 0, torch.is_grad_enabled(), q.requires_grad)
    return key


def _of_latents(view: CacheView) -> bool:
    """Whether values are the first columns of the keys."""
    return decode_ops.one_memory(view.k, view.v, view.k_scale)


def in_tiles(q: Tensor, view: CacheView) -> Tensor:
    """q as wide as the widest tile that the kernel makes of it, by which backends are chosen."""
    if not _of_latents(view):
        return q
    D, D_v = view.k.shape[-1], view.v.shape[-1]
    return q[..., : max(D_v, D - D_v)]


def check_latent_scale(view: CacheView, options: dict[str, Any]) -> None:
    """ValueError where keys hold more than the values that they are, and no scale is given."""
    D, D_v = view.k.shape[-1], view.v.shape[-1]
    if options.get("scale") is None and D_v < D and _of_latents(view):
        raise ValueError(
            f"scale must be given over latents, which are keys of {D} columns and values of {D_v}: "
            "it is that of the head dim before a projection was absorbed"
        )


def _splits(num_splits: int | None, invariant: bool) -> tuple[int | None, bool]:
    """num_splits and batch_invariant, of which one at most is given."""
    invariant = checks.check_flag("batch_invariant", invariant)
    if num_splits is None:
        return None, invariant
    if invariant:
        raise ValueError("num_splits is given by batch_invariant: give one of them")
    return checks.check_count("num_splits", num_splits, 1), False


def _checked(
    q: Tensor, view: CacheView, new_lengths: Tensor | None, options: dict[str, Any]
) -> Options:
    _check_query(q, view)
    if new_lengths is not None:
        checks.check_integers("new_lengths", new_lengths)
        checks.check_placement("new_lengths", new_lengths, (q.shape[0],), q)
    check_latent_scale(view, options)
    if view.window is not None:
        options = _of_ring(view, q.shape[2], options)
    checked = call_options.cache_options(q, view.k, view.v, view.length_bound, options)
    refuse_gradients("decode_attention", q, checked)
    return checked


def refuse_gradients(call: str, q: Tensor, options: Options) -> None:
    """RuntimeError if autograd would ask for gradients of a call that has none."""
    if choices.wants_gradients(q, q, q, options):
        raise RuntimeError(
            f"{call} has no gradients, but an input requires grad: call it under "
            "torch.no_grad() or torch.inference_mode(), or use fastattn.attention"
        )


def _check_query(q: Tensor, view: CacheView) -> None:
    checks.check_tensor("q", q)
    B, (_, H_k, _, D) = view.batch_size, view.k.shape
    if q.dim() != 4 or q.shape[0] != B or q.shape[3] != D:
        raise ValueError(
            f"q must have shape [{B}, H_q, T_q, {D}] to match the cache, got {list(q.shape)}"
        )
    if q.shape[1] % H_k:
        raise ValueError(
            f"q must have a number of heads that the cache's {H_k} divide, got {q.shape[1]}"
        )
    if q.dtype != view.dtype:
        raise TypeError(f"q must have the cache's dtype {view.dtype}, got {q.dtype}")
    checks.check_device("q", q, view.k)


def _of_ring(view: CacheView, T_q: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the window of a ring, and its first positions."""
    assert view.window is not None and view.keep_first is not None
    most = view.page_size - view.keep_first - view.window + 1
    if T_q > most:
        raise ValueError(
            f"q must have at most {most} tokens, as the ring keeps the keys of no more, got {T_q}"
        )
    left = view.window - 1
    if options.get("window") is not None:
        asked, _ = checks.check_window(options["window"])
        if asked is None or asked > left:
            raise ValueError(
                f"window must be within the ring's of {view.window} keys, got {options['window']}"
            )
        left = asked
    if options.get("keep_first", 0) not in (0, view.keep_first):
        raise ValueError(
            f"keep_first must be the ring's {view.keep_first}, got {options['keep_first']}"
        )
    if options.get("stride") is not None:
        raise ValueError("stride: the keys that it shows are not kept by a ring")
    return {**options, "window": (left, None), "keep_first": view.keep_first}
