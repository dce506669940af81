"""Attention over lists of key blocks in torch, with gathered keys."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks, tracing
from ...options import Options
from .. import formula, masks
from ..query_chunks import in_chunks, steps, widened

# Numbers gathered or computed at once: 64 MiB in fp32.
_AT_ONCE = 2**24


def ordered_lists(indices: Tensor, counts: Tensor | None, key_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists for kernels: distinct blocks in order, padded with `key_blocks`; and their lengths.

    indices: int32 or int64 [B, H_s, R, n]; invalid entries and entries from counts [B, H_s, R] on
    are dropped. Returns int32 [B, H_s, R, n] and [B, H_s, R].
    """
    listed = (indices >= 0) & (indices < key_blocks)
    if counts is not None:
        places = torch.arange(indices.shape[-1], device=indices.device)
        listed = listed & (places < counts[..., None])
    ordered = torch.where(listed, indices, key_blocks).to(torch.int32).sort(dim=-1).values
    again = F.pad(ordered[..., 1:] == ordered[..., :-1], (min(1, indices.shape[-1]), 0))
    ordered = ordered.masked_fill(again, key_blocks).sort(dim=-1).values
    return ordered, (ordered < key_blocks).sum(-1, dtype=torch.int32)


@tracing.without_autocast
def attention(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, block: tuple[int, int], options: Options
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse, computed in fp32 or wider.

    In chunks of lists, recomputed for gradients: memory does not grow with T_q times T_k.

    Args:
        q, k, v: [B, H_q, T_q, D], [B, H_k, T_k, D] and [B, H_k, T_k, D_v].
        lists: int32 [B, H_s, R, n], from `ordered_lists`.
        block: queries of a list, keys of a block.
        options: see `kernels.selected.forward.launch_selected_forward`.
    """
    dtype, T_q = q.dtype, q.shape[2]
    if 0 in (q.shape[0], T_q, k.shape[2]):
        o, lse = formula.attention(q, k, v, options, return_lse=True)
        return o, lse
    exists = masks.existing_keys(options, k.shape[2], q.device)
    q, (k, v) = formula.wide(q, None), (formula.wide(x, exists) for x in (k, v))
    B, n = lists.shape[0], lists.shape[3]
    of_row = B * max(k.shape[1], lists.shape[1]) * n * block[1]
    of_row *= k.shape[3] + v.shape[3] + block[0] * max(1, q.shape[1] // k.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor, own: Options, first: int) -> tuple[Tensor, Tensor]:
        count = tracing.ceil_div(q.shape[2], block[0])
        listed = lists[:, :, first // block[0] :][:, :, :count]
        return _attend(q, k, v, exists, listed, first, block, own)

    slices = steps(T_q, block[0] * max(1, _AT_ONCE // max(1, of_row)))
    options = widened(options)
    o, lse = in_chunks(
        attend, (q, k, v), (2, None, None), (2, 2), options, ((rows, options) for rows in slices)
    )
    return o.to(dtype), lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, exists: Tensor | None, lists: Tensor, first: int,
    block: tuple[int, int], options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse of the queries of some lists, from number `first` on."""
    B, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    groups, R = max(H_k, lists.shape[1]), lists.shape[2]
    q = F.pad(q, (0, 0, 0, R * block[0] - T_q)).reshape(B, groups, -1, R, block[0], D)
    k_pos, listed = _places(lists, block[1], T_k, groups)
    batch = torch.arange(B, device=q.device)[:, None, None, None]
    h_k = (torch.arange(groups, device=q.device) * H_k // groups)[:, None, None]
    # Zero the keys of padding entries, which are placeholders.
    k, v = (torch.where(listed[..., None], x[batch, h_k, k_pos], 0.0) for x in (k, v))
    keep = listed[:, :, :, None] & _visible(k_pos, batch, exists, first, block[0], options)
    x = torch.einsum("bgprqd,bgrkd->bgprqk", q, k) * options.scale
    if options.softcap is not None:
        x = options.softcap * torch.tanh(x / options.softcap)
    x = torch.where(keep[:, :, None], x, float("-inf")).reshape(B, H_q, R * block[0], -1)
    weights, lse = formula.normalised(x, options.sinks)
    weights = weights.reshape(*q.shape[:-1], k_pos.shape[-1])
    o = torch.einsum("bgprqk,bgrkd->bgprqd", weights, v)
    return o.reshape(B, H_q, R * block[0], D_v)[:, :, :T_q], lse[:, :, :T_q]


def _places(lists: Tensor, block_k: int, T_k: int, groups: int) -> tuple[Tensor, Tensor]:
    """Positions of the keys of each list, [B, groups, R, n * block_k], and their existence."""
    lists = lists.repeat_interleave(groups // lists.shape[1], 1).long()
    k_pos = (lists[..., None] * block_k + torch.arange(block_k, device=lists.device)).flatten(3)
    listed = k_pos < T_k
    return torch.where(listed, k_pos, 0), listed


def _visible(
    k_pos: Tensor, batch: Tensor, exists: Tensor | None, first: int, block_q: int, options: Options
) -> Tensor:
    """Whether each query of a list sees its keys, [B, groups, R, block_q or 1, keys]."""
    R = k_pos.shape[2]
    rows = first + torch.arange(R * block_q, device=k_pos.device).reshape(R, block_q, 1)
    keep = torch.ones_like(k_pos, dtype=torch.bool) if exists is None else exists[batch, k_pos]
    keep = keep[:, :, :, None]
    left, right = options.band or (None, None)
    offset: Any = options.query_offset
    if options.query_offsets is not None:
        offsets = options.query_offsets.long().clamp(-checks.FARTHEST, checks.FARTHEST)
        offset = offsets[:, None, None, None, None]
    ahead = k_pos[:, :, :, None] - (rows + offset)
    if right is not None:
        keep = keep & (ahead <= right)
    if left is not None:
        keep = keep & (ahead >= -left)
    if options.q_documents is not None and options.k_documents is not None:
        rows = rows.clamp(max=options.q_documents.shape[1] - 1)
        of_keys = options.k_documents[batch, k_pos][:, :, :, None]
        keep = keep & (options.q_documents[:, rows][:, None] == of_keys)
    return keep
