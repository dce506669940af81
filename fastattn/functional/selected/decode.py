"""Decoding by lists: new tokens attend to the key blocks of a cache that they name."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ... import checks
from ...cache.views import view_of_cache, without_window
from ...cache_view import CacheView
from ...torch_backend.selected.selected_formula import ordered_lists
from ..decode import check_query, decode_attention
from .block_sparse_attention import check_lists


@overload
def decode_selected(
    q: Tensor, cache: Any, indices: Tensor, *, block_k: int, counts: Tensor | None = ...,
    return_lse: Literal[False] = ..., scale: float | None = ..., softcap: float | None = ...,
    num_splits: int | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def decode_selected(
    q: Tensor, cache: Any, indices: Tensor, *, block_k: int, counts: Tensor | None = ...,
    return_lse: Literal[True], scale: float | None = ..., softcap: float | None = ...,
    num_splits: int | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode_selected(
    q: Tensor,
    cache: Any,
    indices: Tensor,
    *,
    block_k: int,
    counts: Tensor | None = None,
    return_lse: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention` of the newest tokens of a cache, causal: the cache is read in place.

    Each list becomes a row of a block table over blocks of the cache, which `decode_attention`
    reads: time follows the blocks named. Keys and values are in the cache already.

    Args:
        q: [B, H_q, T_q, D], token i of row b at position lengths[b] - T_q + i.
        cache: as for `decode_attention`, no ring and without padding on the left: contiguous or in
            pages, of numbers, codes or latents, heads before slots in memory.
        indices: int32 or int64 [B, H_s, T_q, n], a list for each new token, as for
            `selected_attention` with block = (1, block_k). Blocks after a token's own are ignored.
        block_k: tokens of a block; it divides the page size, or a contiguous cache's max_length.
        counts: int32 or int64 [B, H_s, T_q]: how many of each list count, from its start.
        return_lse: also return the log of the softmax denominators, fp32 [B, H_q, T_q].
        scale, softcap, num_splits, backend: as for `decode_attention`.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype, or (o, lse); a query without a key has 0 and -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.

    Examples:
        >>> cache = fastattn.KVCache(batch_size=1, num_kv_heads=2, max_length=64, head_dim=16)
        >>> cache.append(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16))
        >>> q = torch.randn(1, 8, 1, 16)
        >>> fastattn.decode_selected(q, cache, torch.tensor([[[[0, 4]]]]), block_k=8).shape
        torch.Size([1, 8, 1, 16])
    """
    view = without_window(view_of_cache(cache)[0], "decode_attention reads one")
    block_k = checks.check_count("block_k", block_k, 1)
    check_query(q, view)
    check_lists(indices, counts, q, view.k, 1, "the cache's")
    if view.starts is not None:
        raise ValueError("cache must have no padding on the left, whose blocks begin elsewhere")
    if view.page_size % block_k:
        raise ValueError(f"block_k must divide the page size {view.page_size}, got {block_k}")
    B, _, T_q, _ = q.shape
    H_k, parts = view.k.shape[1], view.page_size // block_k
    lists, lengths = _listed(view, indices, counts, T_q, block_k)
    # A list for each K/V head at least: blocks of a head are pages of one head.
    H = max(H_k, lists.shape[1])
    lists, lengths = (x.repeat_interleave(H // x.shape[1], 1) for x in (lists, lengths))
    head = torch.arange(H, device=q.device)[:, None, None] * H_k // H
    table = ((_pages(view, lists // parts) * H_k + head) * parts + lists % parts).int()
    buffers: dict[str, Any] = {
        name: _in_blocks(name, getattr(view, name), block_k)
        for name in ("k", "v", "k_scale", "v_scale", "rope")
    }
    rows = view._replace(
        **buffers, block_table=table.flatten(0, 2), lengths=lengths.flatten(), batch_index=None,
        page_size=block_k, length_bound=lists.shape[3] * block_k,
    )  # fmt: skip
    queries = torch.unflatten(q, 1, (H, -1)).transpose(2, 3).flatten(0, 2).unsqueeze(2)
    o, lse = decode_attention(
        queries, rows, causal=False, return_lse=True, scale=scale, softcap=softcap,
        num_splits=num_splits, backend=backend,
    )  # fmt: skip
    o, lse = (
        torch.unflatten(x.squeeze(2), 0, (B, H, T_q)).transpose(2, 3).flatten(1, 2)
        for x in (o, lse)
    )
    return (o, lse) if return_lse else o


def _listed(
    view: CacheView, indices: Tensor, counts: Tensor | None, T_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Blocks of each list that a token sees, in order from the front, and how many keys they hold.

    The own block, which alone may be cut off, comes last.
    """
    columns = 1 if view.block_table is None else view.block_table.shape[1]
    blocks = columns * view.page_size // block_k
    lists, _ = ordered_lists(indices, counts, blocks)
    new = torch.arange(T_q, device=lists.device) - T_q
    position = view.of_batch(view.lengths)[:, None, None] + new  # [B, 1, T_q]
    own = position.div(block_k, rounding_mode="floor")
    count = (lists <= own[..., None]).sum(-1, dtype=torch.int32)
    lists = lists.clamp(max=blocks - 1)
    if not lists.shape[3]:
        return lists, count
    last = lists.gather(-1, (count - 1).clamp(min=0).long()[..., None])[..., 0]
    keys = torch.where(last == own, position % block_k + 1, block_k)
    return lists, ((count - 1) * block_k + keys).masked_fill(count == 0, 0).int()


def _pages(view: CacheView, columns: Tensor) -> Tensor:
    """int64: the page in columns [B, H, T, n] of each row's block table, or the row itself."""
    if view.block_table is None:
        rows = view.batch_index
        if rows is None:
            rows = torch.arange(view.batch_size, device=columns.device)
        return rows.long()[:, None, None, None]
    table = view.of_batch(view.block_table)[:, None, None].expand(*columns.shape[:3], -1)
    return table.gather(-1, columns.long()).long()


def _in_blocks(name: str, x: Tensor | None, block_k: int) -> Tensor | None:
    """Pages [P, H_k, S, ...] as [P * H_k * S / block_k, 1, block_k, ...], in the same memory."""
    if x is None:
        return None
    try:
        return x.view(-1, 1, block_k, *x.shape[3:])
    except RuntimeError as error:
        raise ValueError(
            f"cache must have pages of heads of slots that follow one another in memory, got "
            f"{name} {list(x.shape)} of strides {x.stride()}"
        ) from error
