"""Merge attention over parts of the keys: `merge`, and prefixes shared by a batch."""

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
    """Merge attention over two disjoint sets of keys.

    lse = log(exp(lse1) + exp(lse2)) and o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2, exactly. Ring
    attention (Liu et al. 2023, arXiv 2310.01889) and shared prefixes use it. Differentiable in all
    four, any number of times.

    Args:
        o1, o2: [..., D_v], of one shape and dtype. Computed in fp32 or wider.
        lse1, lse2: fp32 (or fp64) [...], natural log, as from `attention(..., return_lse=True)`.
            -inf: the part has no visible key, and its o is ignored, even NaN.
        backend: "triton", "torch" or "auto"; auto uses the kernel on a GPU if no gradient is
            needed.

    Returns:
        o in o1's dtype, lse in lse1's. Where both lse are -inf, o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not match, or a forced backend cannot
            serve.
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
    """`merge` packed results [total, H_q, D_v] and lse [H_q, total] into o and lse.

    offsets: int [G + 1]; tokens from offsets[-1] on keep their values.
    """
    if dispatch.takes_kernel("merge", backend, {"o1": o1, "lse1": lse1}, "merge"):
        merge_prefix(o1, lse1, o, lse, offsets)
        return
    inside = (torch.arange(o.shape[0], device=o.device) < offsets[-1])[:, None]
    lse1, lse2 = lse1.T.masked_fill(~inside, float("-inf")), lse.T
    merged, merged_lse = _formula(o1, lse1, o, lse2)
    o.copy_(torch.where(inside[..., None], merged, o))
    lse.copy_(torch.where(inside, merged_lse, lse2).T)


def _formula(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    # Replace inf first, as inf - inf is NaN, here and in gradients.
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
    if not checks.check_input("o1", o1, "float", "...", o1, {}).dim():
        raise checks.wrong_shape("o1", o1, "... D_v", {})
    rows = " ".join(f"T{n}" for n in range(o1.dim() - 1))
    sizes = {f"T{n}": size for n, size in enumerate(o1.shape[:-1])} | {"D_v": o1.shape[-1]}
    checks.check_input("o2", o2, "as o1", f"{rows} D_v", o1, sizes)
    checks.check_input("lse1", lse1, "float32 or float64", rows, o1, sizes)
    checks.check_input("lse2", lse2, "as lse1", rows, lse1, sizes)


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
    """`decode_attention` to a prefix shared by all rows, read once, and to each row's own tokens.

    The queries of all rows read the shared keys, such as a system prompt, as one large tile; the
    rest is read row by row, and the two results are merged. Equals attention over the concatenation
    of prefix and row.

    Args:
        q: [B, H_q, T_q, D], the newest tokens of every row.
        prefix: a cache or `CacheView` of one row: the prefix alone.
        cache: a cache or `CacheView` of B rows, including the queries' own tokens.
        forked: the rows of `cache` begin with the prefix (as forked rows of a `PagedKVCache`),
            which is skipped there. Default: they hold only later tokens.
        scale, softcap, sinks: as in `decode_attention`. Windows, other position-dependent options
            and rings are not supported, as one tile has queries of many positions.
        return_lse: also return the log of the softmax denominators.
        how: num_splits and backend, as in `decode_attention`.

    Returns:
        As `decode_attention`.

    Raises:
        TypeError, ValueError, RuntimeError: as `decode_attention`; or a prefix of several rows, or
            a ring.
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    forked = checks.check_flag("forked", forked)
    unknown = how.keys() - {"num_splits", "backend"}
    if unknown:
        raise TypeError(f"cascade_attention does not support {', '.join(sorted(unknown))}")
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
    """The view with the prefix as padding."""
    if view.starts is not None:
        raise ValueError("forked: the cache's rows begin with padding")
    start = prefix.of_batch(prefix.lengths).to(torch.int32)
    return view._replace(starts=start.expand(view.lengths.shape[0]).contiguous())


class SharedPages(NamedTuple):
    """First pages shared by groups of rows, from `shared_pages`, for `attention_paged`.

    Attributes:
        offsets: int [G + 1]: offsets of the groups' tokens.
        table: int32 [G, N]: the pages of each group.
        lengths: int32 [G]: shared tokens of each group.
        starts: int32 [rows of the cache]: shared tokens of each row.
    """

    offsets: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor


def shared_pages(cache: Any, cu_seqlens_q: Tensor, rows: Tensor, lengths: Tensor) -> SharedPages:
    """Describe first pages shared by groups of rows, for `attention_paged(..., shared=)`.

    For forked rows, or rows with equal beginnings of prompts. Rows of a group are adjacent, and the
    groups come first: with rows = [0, 3, 5] and lengths = [64, 32] rows 0, 1 and 2 share their
    first 64 tokens, rows 3 and 4 their first 32, others nothing. Call it once per step for all
    layers with one table; lengths may be 0.

    Args:
        cache, cu_seqlens_q: as for `attention_paged`.
        rows: int32 or int64 [G + 1], from 0 up to at most B.
        lengths: int32 or int64 [G]: shared tokens, older than the step's, in pages at equal
            positions of the rows' block tables.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; a cache
            without pages, or with padding; on a CPU also decreasing rows or rows past B, a length
            larger than a row before the step, two for one row, and a page that is not shared.
    """
    view = view_of_step(cache)
    if view.block_table is None or view.starts is not None:
        what = "without pages" if view.block_table is None else "whose rows begin with padding"
        raise ValueError(f"cache must have pages that rows may share, got one {what}")
    B = view.batch_size
    checks.check_input("cu_seqlens_q", cu_seqlens_q, "integer", "B+1", view.k, {"B+1": B + 1})
    checks.check_offsets("rows", rows, B, view.k, least=1)
    checks.check_input("lengths", lengths, "integer", "G", view.k, {"G": rows.numel() - 1})
    if tracing.host_knows(view.k):
        _check_groups(view, cu_seqlens_q, rows.tolist(), lengths.tolist())
    rows = rows.clamp(0, B)
    listed = view.of_batch(view.block_table)
    of_row = torch.arange(B, device=rows.device)
    # Group of a row: the number of groups that begin at or before it, minus one.
    group = torch.searchsorted(rows, of_row.to(rows.dtype), right=True) - 1
    shares = torch.cat((lengths, lengths.new_zeros(1))).int()[group]
    starts = torch.zeros_like(view.lengths, dtype=torch.int32)
    index = of_row if view.batch_index is None else view.batch_index.long()
    # A graph's padded rows may name one in use.
    starts = starts.scatter_reduce(0, index, shares, "amax")
    if tracing.host_knows(view.k):
        twice = (starts[index] != shares) & (cu_seqlens_q.diff() > 0)
        if twice.any():
            b = int(twice.nonzero()[0])
            raise ValueError(
                f"lengths must be equal where groups name a row of the cache twice, got "
                f"{int(shares[b])} and {int(starts[index[b]])} for row {b}"
            )
    return SharedPages(
        cu_seqlens_q[rows.long()],
        listed[rows[:-1].long().clamp(max=max(0, B - 1))],
        lengths.int(),
        starts,
    )


def _check_groups(view: CacheView, cu_seqlens: Tensor, rows: list[int], lengths: list[int]) -> None:
    """Check that the rows of each group share the pages of their first `length` tokens."""
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


# Options that do not depend on positions.
_ANYWHERE = ("causal", "scale", "softcap", "sinks")


def _by_position(options: dict[str, Any]) -> list[str]:
    """Names of options that depend on positions."""
    values = ((x, options[x]) for x in options if x not in _ANYWHERE)
    return [name for name, x in values if isinstance(x, Tensor) or x not in (None, 0, ())]


def check_shared(shared: SharedPages, view: CacheView, options: dict[str, Any]) -> None:
    """Raise if `attention_paged` cannot serve these pages, or other options with them."""
    call_options.PAGED.refuse_others(options)
    if not isinstance(shared, SharedPages):
        raise TypeError(f"shared must come from shared_pages, got {checks.type_name(shared)}")
    if shared.starts.shape != view.lengths.shape or view.block_table is None:
        raise ValueError(
            f"shared must be of this cache, of {view.lengths.shape[0]} rows in pages, got one of "
            f"{shared.starts.shape[0]}"
        )
    checks.check_input("shared", shared.starts, "", "...", view.k, {})
    if wrong := _by_position(options):
        raise ValueError(
            f"{', '.join(wrong)} cannot be combined with shared: a tile over shared pages has "
            "queries of many positions"
        )
