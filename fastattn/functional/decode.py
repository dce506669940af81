"""`decode_attention`: attention of a few new tokens to a cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch, tracing
from ..cache.checks import check_view_values
from ..cache.dense import KVCache
from ..cache.views import slots_of_tokens, view_of_cache
from ..cache_view import CacheView
from ..dispatch import Explanation
from ..ops import decode as decode_ops
from ..options import Options
from ..torch_backend import decode as decode_torch
from ..torch_backend.paged import decode_rows
from ..tuned import choices
from . import call_memo, call_options, sharded


@torch.no_grad()
def _attend_by_torch(
    q: Tensor, view: CacheView, new_lengths: Tensor | None, options: Options, uniform: int | None,
    *, return_lse: bool,
) -> call_options.Results:  # fmt: skip
    many = view.block_table is not None and q.shape[0] > 1 and q.shape[2]
    if many and new_lengths is None and tracing.host_knows(q):
        return decode_rows(q, view, options, return_lse=return_lse)
    return decode_torch.attend(q, view, new_lengths, options, uniform, return_lse=return_lse)


@call_options.CACHE.sign
def decode_attention(
    q: Tensor,
    cache: Any,
    *,
    new_lengths: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """Attention of the newest T_q tokens of every row of a cache to the row's tokens.

    The cache already includes their keys and values: token i of row b has position lengths[b] - T_q
    + i. With T_q = 2 and causal, rows of 3 and 5 tokens in a cache of 6 (1 = seen, . = no token):

        row 0   1 1 0 . . .        row 1   1 1 1 1 0 .
                1 1 1 . . .                1 1 1 1 1 .

    The lengths are read on the device, so that a CUDA graph of this call serves growing rows. On a
    GPU the keys are split among programs and the parts merged in order, so that the result is
    deterministic.

    Separate kernels are compiled for split and unsplit keys, and for T_q H_q / H_k up to 16 and
    above; other sizes do not recompile. `fastattn.warmup` compiles all of them.

    Args:
        q: [B, H_q, T_q, D] in the cache's dtype, any strides. Query head h reads K/V head
            h // (H_q // H_k). Or a DTensor sharded by rows or heads, whose part on a rank belongs
            to that rank's cache.
        cache: a `KVCache`; a `PagedKVCache`, whose rows in use are the batch, oldest first; or a
            `CacheView` of either, or of tensors (`view_of_tensors`). If causal, queries before a
            short row's first token see nothing. A ring sets window and keep_first, and T_q is at
            most its max_step.
        new_lengths: int32 or int64 [B], clamped to [0, T_q], as for the cache's `append`: only the
            first new_lengths[b] queries of row b are tokens. Token i is at lengths[b] -
            new_lengths[b] + i; the other results are unspecified, but finite. None: all T_q are
            tokens.
        num_splits: number of parts that a row's keys are split into. Default: enough to fill the
            GPU, by batch size, heads and cache size. It changes the last bits of the result, which
            with a given number do not depend on other rows. Not with batch_invariant.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto" (default; FASTATTN_BACKEND replaces it);
            `explain_decode` reports the choice. torch copies the keys and values unless the cache
            is a plain `KVCache`.
        options: causal (here default True), window, keep_first, stride, mask_mod, mod_tensors,
            scale, softcap, alibi_slopes, relative_bias, score_mod, sinks, attn_mask, attn_bias and
            batch_invariant, as for `fastattn.attention`; the last dim of a mask or bias are
            positions from 0, up to length_bound. No batch_invariant with padding on the left.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log, sink included. A query that sees no key has o = 0 and lse = -inf (or its sink). Unused
        slots and pages, even with NaN, do not affect them.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or a forced
            backend that cannot serve the call.
        RuntimeError: an input requires grad while grad mode is on: a cache has no gradients.
    """
    if type(return_lse) is not bool:
        return_lse = checks.check_flag("return_lse", return_lse)
    newest, slots = None, None
    if type(cache) is KVCache and num_splits is None and not return_lse:
        slots = slots_of_tokens(cache)
    if slots is not None:
        newest = _newest_key(q, cache, new_lengths, backend, options, slots)
        cached = call_memo.find(newest)
        if cached is not None:
            return cached.run(q, cache.k, cache.v, *slots)
    view, uniform = _view_for(q, cache)
    if view.lengths.is_cpu and isinstance(cache, CacheView):
        check_view_values(view)
    arguments = {"new_lengths": new_lengths, "num_splits": num_splits, **options}
    key = with_cache(call_memo.key_of((q,), arguments, backend, return_lse), q, view, arguments)
    cached = call_memo.find(key)
    if cached is not None:
        return cached.run(q, view, new_lengths, cached.options_of(arguments), uniform)
    if key is None and sharded.is_dtensor(q):
        part = partial(
            decode_attention,
            cache=cache,
            num_splits=num_splits,
            return_lse=return_lse,
            backend=backend,
        )
        result: Any = sharded.attend(part, {"q": q}, {"new_lengths": new_lengths, **options})
        return result
    checked = _checked_decode(q, view, new_lengths, options)
    num_splits = _splits(num_splits, checked)
    choice = choose(q, view, checked, backend)
    dispatch.log_once("decode_attention", choice, q, view.k, view.v, checked)
    key_options = {name: x for name, x in arguments.items() if name != "new_lengths"}
    call = (q, view, new_lengths, checked, uniform)
    if choice.backend == "torch":
        if not q.is_cpu:
            dispatch.warn_if_slow(choice, q.device)
        attend = None if newest is None else decode_torch.over_slots(q, checked, return_lse)
        if attend is not None and slots is not None:
            of_tokens = (q, view.k, view.v, *slots)
            return call_memo.first(attend, of_tokens, newest, key_options, checked, by_torch=True)
        run = partial(_attend_by_torch, return_lse=return_lse)
        return call_memo.first(run, call, key, key_options, checked, by_torch=True)
    with torch.no_grad():
        if key is not None:
            prepared = decode_ops.prepare(q, view, new_lengths, checked, num_splits, return_lse)
            results = call_memo.first(prepared, call, key, key_options, checked)
            if results is not None:
                return results
        o, lse = decode_ops.attend(q, view, new_lengths, checked, num_splits)
    return (o, lse) if return_lse else o


def attend_to_part(
    q: Tensor,
    cache: Any,
    num_splits: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`decode_attention` for `merge`: for q in fp64, which only torch serves, lse is fp64 too.

    Rounded to fp32, an lse of 1e4 would change the weights of a part by 5e-4.
    """
    if q.dtype != torch.float64 or sharded.is_dtensor(q):
        how: dict[str, Any] = {"num_splits": num_splits, "backend": backend, **options}
        return decode_attention(q, cache, return_lse=True, **how)
    view, uniform = _view_for(q, cache)
    checked = _checked_decode(q, view, None, options)
    _splits(num_splits, checked)
    choose(q, view, checked, backend)
    with torch.no_grad():
        wide = checked._replace(fp32_results=True)
        o, lse = decode_torch.attend(q, view, None, wide, uniform, return_lse=True)
    return o, lse


@call_options.CACHE.sign
def explain_decode(
    q: Tensor,
    cache: Any,
    *,
    new_lengths: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Return the backend of a call of `decode_attention`, and why a faster one was not used.

    Checks the arguments as `decode_attention` does, and computes nothing.
    """
    checks.check_flag("return_lse", return_lse)
    view, _ = _view_for(q, cache)
    checked = _checked_decode(q, view, new_lengths, dict(options))
    _splits(num_splits, checked)
    choice = choose(q, view, checked, backend)
    return dispatch.with_findings(choice, q, view.v, ("decode",))


def _newest_key(
    q: Tensor, cache: KVCache, new_lengths: Tensor | None, backend: str | None,
    options: dict[str, Any], slots: tuple[Any, Any],
) -> list[Any] | None:  # fmt: skip
    """Memo key of calls over the tokens of a cache on a CPU, however many; None: others.

    Strides and alignment, which it lacks, do not change what torch computes.
    """
    k = cache.k
    if tracing.may_be_traced(q) or tracing.in_forward_mode() or not (q.is_cpu and k.is_cpu):
        return None
    if q.is_nested or (q.requires_grad and torch.is_grad_enabled()):
        return None
    if torch._C._is_any_autocast_enabled():  # which the torch backend switches off
        return None
    if type(slots[0]) is list and not decode_torch.by_rows(q, cache.length_bound):
        return None
    key = [backend, dispatch.raw_name(), q.shape, q.dtype, q.layout, k.shape, cache.dtype]
    if new_lengths is not None:
        options = {"new_lengths": new_lengths, **options}
    return key if not options or call_memo.add_values(key, options) else None


def with_cache(
    key: list[Any] | None, q: Tensor, view: CacheView, arguments: dict[str, Any]
) -> list[Any] | None:
    """Extend a memo key by the properties of a cache, without its lengths on the device."""
    if key is None or q.layout is not torch.strided:
        return None
    key += (view.page_size, view.keep_first, view.window, view.dtype)
    key.append(_of_latents(view))
    if "attn_mask" in arguments or "attn_bias" in arguments:  # which must cover the positions
        key.append(view.length_bound)
    tensors = (view.k, view.v, view.lengths, view.k_scale, view.v_scale, view.block_table)
    for x in (*tensors, view.starts, view.batch_index, view.rope):
        if x is not None and x.is_neg():
            return None
        key.append(None if x is None else call_memo.layout(x))
    key += (q.data_ptr() & 15 == 0, torch.is_grad_enabled(), q.requires_grad)
    return key


def _of_latents(view: CacheView) -> bool:
    """Whether values are the first columns of the keys."""
    if view.rope is not None:
        return True
    return decode_ops.one_memory(view.k, view.v, view.k_scale, view.v_scale)


def choose(q: Tensor, view: CacheView, options: Options, backend: str | None) -> Explanation:
    """The backend of a call with checked options, q batched or packed."""
    if q.dim() == 3:
        q = q[None]
    if _of_latents(view):
        # The width of the kernel's widest tile.
        D, D_v = view.head_dim, view.v.shape[-1]
        q = q[..., : max(D_v, D - D_v)]
    return dispatch.choose(q, view.k, view.v, options, backend, family="decode")


def check_latent_scale(view: CacheView, options: dict[str, Any]) -> None:
    """Raise ValueError for latents with further key columns and no scale."""
    D, D_v = view.head_dim, view.v.shape[-1]
    if options.get("scale") is None and D_v < D and _of_latents(view):
        raise ValueError(
            f"scale must be given over latents, which are keys of {D} columns and values of {D_v}: "
            "use the head dim before a projection was absorbed"
        )


def _splits(num_splits: int | None, options: Options) -> int | None:
    """Check num_splits, which is not for calls with batch_invariant."""
    if num_splits is not None and options.batch_invariant:
        raise ValueError("num_splits cannot be combined with batch_invariant, which determines it")
    return None if num_splits is None else checks.check_count("num_splits", num_splits, 1)


def _checked_decode(
    q: Tensor, view: CacheView, new_lengths: Tensor | None, options: dict[str, Any]
) -> Options:
    sizes = check_query(q, view)
    if new_lengths is not None:
        checks.check_input("new_lengths", new_lengths, "integer", "B", q, sizes)
    check_latent_scale(view, options)
    if view.window is not None:
        options = _of_ring(view, q.shape[2], options)
    checked = call_options.cache_options(q, view.k, view.v, sizes, view.length_bound, options)
    check_order(view, checked)
    refuse_gradients("decode_attention", q, checked)
    return checked


def check_order(view: CacheView, options: Options) -> None:
    """Raise ValueError if padding moves keys to other blocks than without padding."""
    if options.batch_invariant and view.starts is not None:
        raise ValueError(
            "padding on the left cannot be combined with batch_invariant: it moves keys to other "
            "blocks"
        )


def refuse_gradients(call: str, q: Tensor, options: Options) -> None:
    """Raise RuntimeError if an input requires grad in a call without gradients."""
    if choices.wants_gradients(q, q, q, options):
        raise RuntimeError(
            f"{call} has no gradients, but an input requires grad: call it under "
            "torch.no_grad() or torch.inference_mode(), or use fastattn.attention"
        )


def check_query(q: Tensor, view: CacheView, dims: str = "B H_q T_q D") -> checks.Sizes:
    """Check q by a cache; return the sizes of its dims and B."""
    sizes = {"B": view.batch_size, "D": view.head_dim}
    checks.check_input("q", q, "", dims, view.k, sizes)
    checks.check_group("cache", "q", q.shape[1], view.k.shape[1])
    if q.dtype != view.dtype:
        raise TypeError(f"q must have the cache's dtype {view.dtype}, got {q.dtype}")
    return sizes


def _view_for(q: Tensor, cache: Any) -> tuple[CacheView, int | None]:
    """`view_of_cache`, which must hold the keys that the queries see."""
    view, uniform = view_of_cache(cache)
    if lost := getattr(cache, "lost", 0):
        check_query(q, view)
        _of_ring(view, q.shape[2], {}, lost)
    return view, uniform


def _of_ring(view: CacheView, T_q: int, options: dict[str, Any], lost: int = 0) -> dict[str, Any]:
    """Options with a ring's window and keep_first. lost: tokens that `truncate` took away."""
    window, first = view.window, view.keep_first
    assert window is not None and first is not None
    most = view.page_size - first - window + 1 - lost
    if T_q > most:
        after = f" after truncate took {lost} tokens: append first" if lost else ""
        raise ValueError(
            f"q must have at most {most} tokens, as the ring keeps the keys of no more{after}, "
            f"got {T_q}"
        )
    left = window - 1
    if options.get("window") is not None:
        window_left, _ = checks.check_window(options["window"])
        if window_left is None or window_left > left:
            raise ValueError(
                f"window must be within the ring's of {window} keys, got {options['window']}"
            )
        left = window_left
    if (given := options.get("keep_first", 0)) not in (0, first):
        raise ValueError(f"keep_first must be the ring's {first}, got {given}")
    if options.get("stride") is not None:
        raise ValueError("stride is not supported with a ring, which drops keys that it shows")
    return {**options, "window": (left, None), "keep_first": first}
