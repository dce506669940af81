"""Attention over parts of the keys, put together: `merge`, and prefixes that a batch shares."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, dispatch, tracing
from ..cache.views import view_of_cache, view_of_step
from ..cache_view import CacheView
from ..ops.merge import merge_forward, merge_prefix
from . import call_options
from .decode import attend_to_part


def merge(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each.

    With the log of the softmax denominators of each, lse = log(exp(lse1) + exp(lse2)) and
    o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2: exact, since a softmax is a sum over keys divided
    by another one. Ring attention (Liu et al. 2023, arXiv 2310.01889) and shared prefixes are made
    of it. Differentiable in all four, any number of times.

    Args:
        o1, o2: [..., D_v], of one shape and dtype. Computed in fp32 or wider.
        lse1, lse2: fp32 (or fp64) [...], natural log, as `attention(..., return_lse=True)` has
            them. Where one is -inf, its part saw no key: its o is not read, be it NaN.
        backend: "triton", "torch" or "auto"; auto takes the kernel for tensors on a GPU where no
            gradient is wanted.

    Returns:
        o in o1's dtype, lse in lse1's. Where both lse are -inf, o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not go together, or a forced
            backend that cannot serve.
    """
    _check(o1, lse1, o2, lse2)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (o1, lse1, o2, lse2))
    inputs = {"o1": o1, "lse1": lse1}
    if dispatch.takes_kernel("merge", backend, inputs, "merge") and not wants_grad:
        return merge_forward(o1, lse1, o2, lse2)
    return _formula(o1, lse1, o2, lse2)


def merge_into(
    o1: Tensor, lse1: Tensor, o: Tensor, lse: Tensor, offsets: Tensor, backend: str | None
) -> None:
    """`merge` of packed results [total, H_q, D_v] and lse [H_q, total], into o and lse.

    offsets: int [G + 1]; tokens from the last one on keep what stands there.
    """
    takes = dispatch.takes_kernel("merge", backend, {"o1": o1, "lse1": lse1}, "merge")
    if takes and not tracing.may_be_traced(o):
        merge_prefix(o1, lse1, o, lse, offsets)
        return
    inside = (torch.arange(o.shape[0], device=o.device) < offsets[-1])[:, None]
    lse1, lse2 = lse1.T.masked_fill(~inside, float("-inf")), lse.T
    merged, merged_lse = _formula(o1, lse1, o, lse2)
    o.copy_(torch.where(inside[..., None], merged, o))
    lse.copy_(torch.where(inside, merged_lse, lse2).T)


def _formula(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    # Each inf is replaced before it meets another: inf - inf would be NaN, here or in a gradient.
    largest = torch.maximum(lse1, lse2).detach()
    blind = largest == float("-inf")
    largest = torch.where(blind, 0.0, largest)
    share1, share2 = torch.exp(lse1 - largest), torch.exp(lse2 - largest)
    total = torch.where(blind, 1.0, share1 + share2)
    o = _weighted(o1, lse1, share1 / total) + _weighted(o2, lse2, share2 / total)
    lse = torch.where(blind, float("-inf"), largest + torch.log(total))
    return o.to(o1.dtype), lse


def _weighted(o: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
    seen = (lse != float("-inf")).unsqueeze(-1)
    wide = torch.where(seen, o, 0.0).to(torch.promote_types(o.dtype, torch.float32))
    return weight.unsqueeze(-1) * wide


def _check(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> None:
    for name, x in (("o1", o1), ("lse1", lse1), ("o2", o2), ("lse2", lse2)):
        checks.check_floats(name, x)
    if o1.dim() < 1 or o2.dtype != o1.dtype:
        raise TypeError(f"o2 must have the dtype of o1 ({o1.dtype}), got {o2.dtype}")
    checks.check_placement("o2", o2, tuple(o1.shape), o1)
    for name, x in (("lse1", lse1), ("lse2", lse2)):
        if x.dtype not in (torch.float32, torch.float64) or x.dtype != lse1.dtype:
            raise TypeError(f"{name} must be float32 or float64, as lse1 is, got {x.dtype}")
        checks.check_placement(name, x, tuple(o1.shape[:-1]), o1)


def cascade_attention(
    q: Tensor,
    prefix: Any,
    cache: Any,
    *,
    forked: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **how: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` to a prefix that all rows share, read once, and to each row's own tokens.

    The keys that a batch shares, such as a system prompt, are read by the queries of all rows as
    one large tile; the rest goes row by row, and the two are merged. It equals attention over the
    concatenation of prefix and row.

    Args:
        q: [B, H_q, T_q, D], the newest tokens of every row.
        prefix: a cache or `CacheView` of one row: the prefix alone.
        cache: a cache or `CacheView` of B rows, in which every query finds its own token.
        forked: the rows of `cache` begin with the prefix, as rows of a `PagedKVCache` do that were
            forked from it; there it is passed over. Default: they hold what follows it.
        scale, softcap, sinks: as in `decode_attention`. Windows and whatever else depends on a
            position have no place here, as one tile holds queries of many, and nor have rings.
        return_lse: also return the log of the softmax denominators.
        how: num_splits, batch_invariant and backend, as in `decode_attention`.

    Returns:
        As `decode_attention`.

    Raises:
        TypeError, ValueError, RuntimeError: as `decode_attention`; or a prefix of several rows, or
            a ring.
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    forked = checks.check_flag("forked", forked)
    unknown = how.keys() - {"num_splits", "batch_invariant", "backend"}
    if unknown:
        raise TypeError(f"cascade_attention takes no {', '.join(sorted(unknown))}")
    shared, _ = view_of_cache(prefix, "prefix")
    view, _ = view_of_cache(cache)
    if shared.batch_size != 1:
        raise ValueError(f"prefix must have one row, got {shared.batch_size}")
    for name, of in (("prefix", shared), ("cache", view)):
        if of.window is not None:
            raise ValueError(f"{name} must hold every token, got a ring of window={of.window}")
    own = _after_prefix(view, shared) if forked else cache
    checks.check_tensor("q", q)
    o2, lse2 = attend_to_part(q, own, scale=scale, softcap=softcap, sinks=sinks, **how)
    B, H_q, T_q, D = q.shape
    together = q.transpose(0, 1).reshape(1, H_q, B * T_q, D)
    o1, lse1 = attend_to_part(together, shared, causal=False, scale=scale, softcap=softcap, **how)
    o1 = o1.view(H_q, B, T_q, o1.shape[3]).transpose(0, 1)
    lse1 = lse1.view(H_q, B, T_q).transpose(0, 1)
    o, lse = merge(o1, lse1, o2, lse2, backend=how.get("backend"))
    return (o, lse.float()) if return_lse else o


def _after_prefix(view: CacheView, prefix: CacheView) -> CacheView:
    """The view with the prefix taken for padding."""
    if view.starts is not None:
        raise ValueError("forked: the cache's rows begin with padding")
    start = prefix.of_batch(prefix.lengths).to(torch.int32)
    return view._replace(starts=start.expand(view.lengths.shape[0]).contiguous())


class SharedPages(NamedTuple):
    """First pages that rows of a step share, as `shared_pages` makes them for `attention_paged`.

    Attributes:
        offsets: int [G + 1]: the tokens of each group of rows.
        table: int32 [G, N]: the pages of each group.
        lengths: int32 [G]: tokens that its rows share.
        starts: int32 [rows of the cache]: tokens that a row shares with others.
    """

    offsets: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor


def shared_pages(cache: Any, cu_seqlens_q: Tensor, rows: Tensor, lengths: Tensor) -> SharedPages:
    """First pages that groups of rows share, for `attention_paged(..., shared=)`.

    For rows that were forked from one, or whose prompts begin alike. Rows of a group lie beside
    each other, and the groups come first: with rows = [0, 3, 5] and lengths = [64, 32] rows 0, 1
    and 2 share their first 64 tokens, rows 3 and 4 their first 32, others nothing. Made once a
    step it serves all layers that share a table, and lengths may be 0.

    Args:
        cache, cu_seqlens_q: as for `attention_paged`.
        rows: int32 or int64 [G + 1], from 0 up to at most B.
        lengths: int32 or int64 [G]: tokens, older than the step's, in pages that all rows of the
            group list in the same places.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; a cache
            without pages, or with padding; on a CPU also rows that fall or pass B, a length past
            what one of the rows held before the step, and a page that rows do not share.
    """
    view = view_of_step(cache)
    if view.block_table is None or view.starts is not None:
        what = "without pages" if view.block_table is None else "whose rows begin with padding"
        raise ValueError(f"cache must have pages that rows may share, got one {what}")
    B = view.batch_size
    checks.check_integers("cu_seqlens_q", cu_seqlens_q)
    checks.check_placement("cu_seqlens_q", cu_seqlens_q, (B + 1,), view.k)
    checks.check_integers("rows", rows)
    checks.check_placement("rows", rows, (max(1, rows.numel()),), view.k)
    checks.check_integers("lengths", lengths)
    checks.check_placement("lengths", lengths, (rows.numel() - 1,), view.k)
    if tracing.host_knows(view.k):
        checks.check_offset_values("rows", rows, B, whole=False)
        _check_groups(view, cu_seqlens_q, rows.tolist(), lengths.tolist())
    rows = rows.clamp(0, B)
    listed = view.of_batch(view.block_table)
    of_row = torch.arange(B, device=rows.device)
    # As many as begin at or before the row, less one: its group, or past the last one.
    group = torch.searchsorted(rows, of_row.to(rows.dtype), right=True) - 1
    shares = torch.cat((lengths, lengths.new_zeros(1))).int()[group]
    starts = torch.zeros_like(view.lengths, dtype=torch.int32)
    index = of_row if view.batch_index is None else view.batch_index.long()
    return SharedPages(
        cu_seqlens_q[rows.long()],
        listed[rows[:-1].long().clamp(max=max(0, B - 1))],
        lengths.int(),
        starts.index_copy(0, index, shares),
    )


def _check_groups(view: CacheView, cu_seqlens: Tensor, rows: list[int], lengths: list[int]) -> None:
    """The rows of each group share the pages that hold so many of their older tokens."""
    assert view.block_table is not None
    table, counts = view.of_batch(view.block_table), cu_seqlens.diff().tolist()
    held = view.of_batch(view.lengths).tolist()
    for g, (first, last) in enumerate(pairwise(rows)):
        length, pages = lengths[g], -(-lengths[g] // view.page_size)
        for b in range(first, last):
            if counts[b] and not 0 <= length <= held[b] - counts[b]:
                raise ValueError(
                    f"lengths must be from 0 to the older tokens of each row of a group, "
                    f"{held[b] - counts[b]} of row {b}, got {length}"
                )
            if not torch.equal(table[b, :pages], table[first, :pages]):
                raise ValueError(
                    f"rows must share their first {pages} pages with those of their group, "
                    f"row {b} does not with row {first}"
                )


# Options that a query has wherever it stands.
_ANYWHERE = ("causal", "scale", "softcap", "sinks")


def by_position(options: dict[str, Any]) -> list[str]:
    """The options among these that go by the positions of queries and keys."""
    given = ((x, options[x]) for x in options if x not in _ANYWHERE)
    return [name for name, x in given if isinstance(x, Tensor) or x not in (None, 0, ())]


def check_shared(
    shared: SharedPages, view: CacheView, options: dict[str, Any], batch_invariant: bool
) -> None:
    """Raise where `attention_paged` cannot take these pages, or other options beside them."""
    call_options.PAGED.refuse_others(options)
    if not isinstance(shared, SharedPages):
        raise TypeError(f"shared must come from shared_pages, got {checks.type_name(shared)}")
    if shared.starts.shape != view.lengths.shape or view.block_table is None:
        raise ValueError(
            f"shared must be of this cache, of {view.lengths.shape[0]} rows in pages, got one of "
            f"{shared.starts.shape[0]}"
        )
    checks.check_device("shared", shared.starts, view.k)
    if batch_invariant:
        raise ValueError(
            "shared goes without batch_invariant: which keys are merged depends on the batch"
        )
    if wrong := by_position(options):
        raise ValueError(
            f"shared goes without {', '.join(wrong)}: a tile over shared pages has queries of many "
            "positions"
        )
