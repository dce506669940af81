"""`attention_paged`: attention of packed new tokens to a paged cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch, tracing
from ..cache.checks import check_view_values
from ..cache.views import view_of_step
from ..cache_view import CacheView
from ..dispatch import Explanation
from ..ops import decode as decode_ops
from ..options import Options
from ..torch_backend import paged as paged_torch
from . import call_memo, call_options
from .decode import (
    check_latent_scale,
    check_order,
    check_query,
    choose,
    refuse_gradients,
    with_cache,
)
from .merge import SharedPages, check_shared, merge_into

# Tree mask: one tensor for all rows, or matrices and their starts.
TreeMask = Tensor | tuple[Tensor, Tensor] | None


_attend_by_torch = torch.no_grad()(paged_torch.attend)


@call_options.PAGED.sign
def attention_paged(
    q: Tensor,
    cache: Any,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int | None = None,
    tree_mask: TreeMask = None,
    shared: SharedPages | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """Attention of any number of newest tokens of every row of a cache to the row's tokens.

    One step of a server: prompt chunks, decoding rows and rows without new tokens, packed without
    padding. The cache already includes their keys and values: token i of the n = cu_seqlens_q[b +
    1] - cu_seqlens_q[b] tokens of row b has position lengths[b] - n + i. Causal, rows of 4 and 3
    tokens, 3 and 1 of them new, cu_seqlens_q = [0, 3, 4] (1 = seen, . = no token):

        q[0]   1 1 0 0        q[3]   1 1 1 .
        q[1]   1 1 1 0
        q[2]   1 1 1 1

    Offsets and lengths are read on the device: the call does not wait, and its CUDA graph serves
    other lengths, up to max_seqlen_q new tokens per row. On a GPU rows with up to 16 new tokens
    times H_q / H_k are a launch with tiles of 16, others a launch with tiles of 64; if tiles are
    too few for the GPU, keys are split, and the parts merged in order.

    Args:
        q: [total, H_q, D] in the cache's dtype, any strides. Query head h reads K/V head
            h // (H_q // H_k). Further tokens may follow the last row's.
        cache: a `PagedKVCache`, whose rows in use are the batch, oldest first; a `KVCache` without
            a window; a `CacheView` (`view_of_tensors` makes one of a server's tensors); or (k_pages
            [P, H_k, S, D], v_pages [P, H_k, S, D_v], block_table [B, N], lengths [B]).
        cu_seqlens_q: int32 or int64 [B + 1], from 0 up to at most total.
        max_seqlen_q: bound on a row's new tokens; default total. If it is up to 16 H_k / H_q, there
            is no launch for longer rows.
        tree_mask: visibility between a row's new tokens, in addition to older keys: bool [total,
            W], for query i and new token j of its row, W at least the most new tokens of a row; or
            (flat, starts), bool [M] with an n x n matrix per row from starts int32 or int64 [B] on.
            A draft's tokens see their ancestors and themselves; with causal, only earlier ones in
            the row.
        shared: first pages shared by rows, from `shared_pages`, read once for all queries of these
            rows and merged by lse. Results are equal up to rounding. Only causal, scale, softcap
            and sinks are served with it, as others depend on positions, and a tile over shared
            pages has queries of many positions.
        out: [total, H_q, D_v] in q's dtype, last dim contiguous, written in place and returned.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto" (default; FASTATTN_BACKEND replaces it);
            `explain_paged` reports the choice. torch computes row by row, and waits for the device.
        options: causal (here default True), window, keep_first, stride, mask_mod, mod_tensors,
            scale, softcap, alibi_slopes ([H_q] or [B, H_q]), relative_bias, score_mod, sinks and
            batch_invariant, as for `fastattn.attention`.

    Returns:
        o [total, H_q, D_v] in q's dtype; with return_lse also lse, fp32 [H_q, total], in natural
        log, sink included. A query that sees no key has o = 0 and lse = -inf (or its sink); so has
        a token of no row, whose sink does not count. Unused slots and pages do not affect them.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; on a CPU also
            decreasing offsets or offsets past total, negative lengths or lengths past a row's
            slots, and invalid page numbers; or a forced backend that cannot serve the call. On a
            GPU no access leaves the tensors, whatever these hold.
        RuntimeError: an input requires grad while grad mode is on: a cache has no gradients.
    """
    if type(return_lse) is not bool:
        return_lse = checks.check_flag("return_lse", return_lse)
    view = view_of_step(cache)
    if shared is not None:
        how = {"max_seqlen_q": max_seqlen_q, "tree_mask": tree_mask, "out": out, "backend": backend}
        check_shared(shared, view, options)
        result = _over_shared(q, view, cu_seqlens_q, shared, options, how)
        return result if return_lse else result[0]
    arguments = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "tree_mask": tree_mask,
        "out": out,
        **options,
    }
    key = with_cache(call_memo.key_of((q,), arguments, backend, return_lse), q, view, arguments)
    cached = call_memo.find(key)
    if cached is not None:
        _check_values(q, view, cu_seqlens_q, max_seqlen_q, tree_mask)
        return cached.run(q, view, cu_seqlens_q, out, cached.options_of(arguments))
    checked = _checked_step(q, view, cu_seqlens_q, max_seqlen_q, tree_mask, out, options)
    choice = choose(q, view, checked, backend)
    dispatch.log_once("attention_paged", choice, q, view.k, view.v, checked)
    key_options = {x: arguments[x] for x in arguments if x not in ("cu_seqlens_q", "out")}
    call = (q, view, cu_seqlens_q, out, checked)
    if choice.backend == "torch":
        if not q.is_cpu:
            dispatch.warn_if_slow(choice, q.device)
        run = partial(_attend_by_torch, return_lse=return_lse)
        return call_memo.first(run, call, key, key_options, checked, by_torch=True)
    longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    with torch.no_grad():
        if key is not None:
            prepared = decode_ops.prepare_packed(*call, longest, return_lse)
            results = call_memo.first(prepared, call, key, key_options, checked)
            if results is not None:
                return results
        o, lse = decode_ops.attend_packed(*call, longest)
    return (o, lse) if return_lse else o


@call_options.PAGED.sign
def explain_paged(
    q: Tensor,
    cache: Any,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int | None = None,
    tree_mask: TreeMask = None,
    shared: SharedPages | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Return the backend of a call of `attention_paged`, and why a faster one was not used.

    Checks the arguments as `attention_paged` does, and computes nothing.
    """
    checks.check_flag("return_lse", return_lse)
    view = view_of_step(cache)
    if shared is not None:
        check_shared(shared, view, dict(options))
    checked = _checked_step(q, view, cu_seqlens_q, max_seqlen_q, tree_mask, out, dict(options))
    choice = choose(q, view, checked, backend)
    return dispatch.with_findings(choice, q, view.v, ("decode",))


def _over_shared(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, shared: SharedPages, options: dict[str, Any],
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse of a step with shared pages: attend to later pages per row, to shared pages per
    group, and merge.
    """
    own = view._replace(starts=shared.starts)
    o, lse = _part(q, own, cu_seqlens, how, options)
    prefix = view._replace(block_table=shared.table, lengths=shared.lengths, batch_index=None)
    # Queries see all shared pages; sinks apply to the rest.
    scores = {**options, "causal": False, "sinks": None}
    alone = {**how, "max_seqlen_q": None, "tree_mask": None, "out": None}
    merge_into(
        *_part(q, prefix, shared.offsets, alone, scores), o, lse, shared.offsets, how["backend"]
    )
    return o, lse.float()


def _part(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, how: dict[str, Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`attention_paged` for `merge_into`: for q in fp64 lse is fp64 too, as in `attend_to_part`."""
    if getattr(q, "dtype", None) != torch.float64:
        return attention_paged(q, view, cu_seqlens, return_lse=True, **how, **options)
    longest, tree, out, backend = (how[x] for x in ("max_seqlen_q", "tree_mask", "out", "backend"))
    checked = _checked_step(q, view, cu_seqlens, longest, tree, out, options)
    choice = choose(q, view, checked, backend)
    dispatch.warn_if_slow(choice, q.device)
    with torch.no_grad():
        wide = checked._replace(fp32_results=True)
        results: Any = paged_torch.attend(q, view, cu_seqlens, out, wide, return_lse=True)
    return results


def _checked_step(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, longest: int | None, tree: TreeMask,
    out: Tensor | None, options: dict[str, Any],
) -> Options:  # fmt: skip
    sizes = check_query(q, view, "total_q H_q D")
    of_rows = {"B+1": sizes["B"] + 1}
    checks.check_input("cu_seqlens_q", cu_seqlens, "integer", "B+1", q, of_rows)
    if longest is not None:
        longest = checks.check_count("max_seqlen_q", longest, 0)
    if out is not None:
        _check_out(out, q, sizes | {"D_v": view.v.shape[3]})
    check_latent_scale(view, options)
    checked = call_options.paged_options(q, view.k, view.v, sizes, options)
    if tree is not None:
        checked = _with_tree(checked, tree, q, view.batch_size)
    check_order(view, checked)
    refuse_gradients("attention_paged", q, checked)
    _check_values(q, view, cu_seqlens, longest, tree)
    return checked


def _check_values(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, longest: int | None, tree: TreeMask
) -> None:
    """Check offsets, lengths, pages and tree mask, if on the CPU."""
    if not tracing.host_knows(q):
        return
    checks.check_offset_values("cu_seqlens_q", cu_seqlens, q.shape[0])
    counts = cu_seqlens.diff()
    if longest is not None and counts.numel() and int(counts.max()) > longest:
        b = int(counts.argmax())
        raise ValueError(
            f"max_seqlen_q must be at least {int(counts[b])}, the new tokens of row {b}, "
            f"got {longest}"
        )
    check_view_values(view)
    if tree is not None:
        _check_tree_reaches(tree, counts.tolist())


def _check_out(out: Tensor, q: Tensor, sizes: checks.Sizes) -> None:
    checks.check_input("out", out, "as q", "total_q H_q D_v", q, sizes)
    steps = zip(out.shape, out.stride(), strict=True)
    negative = not tracing.may_be_traced(out) and out.is_neg()
    if out.stride(2) != 1 or negative or any(n > 1 and step == 0 for n, step in steps):
        raise ValueError(
            "out must be a plain tensor of its own memory whose last dim is contiguous, got "
            f"strides {out.stride()}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("out requires grad, and attention_paged has no gradients")


def _with_tree(options: Options, tree: TreeMask, q: Tensor, B: int) -> Options:
    """Add a tree mask to the options."""
    if not isinstance(tree, tuple):
        checks.check_input("tree_mask", tree, "bool", "total_q W", q, {"total_q": q.shape[0]})
        return options._replace(tree_mask=tree)
    if len(tree) != 2:
        raise TypeError(f"tree_mask must be (flat, starts), got a tuple of {len(tree)}")
    flat, starts = tree
    checks.check_input("tree_mask[1]", starts, "integer", "B", q, {"B": B})
    checks.check_input("tree_mask[0]", flat, "bool", "M", q, {})
    return options._replace(tree_mask=flat.contiguous(), tree_starts=starts)


def _check_tree_reaches(tree: Tensor | tuple[Tensor, Tensor], counts: list[int]) -> None:
    """Check that the tree mask covers all new tokens of each row."""
    for b, n in enumerate(counts):
        if isinstance(tree, Tensor):
            if n > tree.shape[1]:
                raise ValueError(
                    f"tree_mask must have a column for each of the {n} new tokens of row {b}, "
                    f"got {tree.shape[1]}"
                )
        elif n and not 0 <= int(tree[1][b]) <= tree[0].shape[0] - n * n:
            raise ValueError(
                f"tree_mask[1] must leave row {b} its {n} x {n} of {tree[0].shape[0]} elements, "
                f"got {int(tree[1][b])}"
            )
