"""Naive attention in plain torch: the oracle of every test, in any floating dtype.

It states the mask in its own words and shares nothing with the kernels, so that a wrong rule on
either side shows.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from .checks import Window


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window = ...,
    key_padding_mask: Tensor | None = ..., key_lengths: Tensor | None = ...,
    query_offset: int | Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., window: Window = ...,
    key_padding_mask: Tensor | None = ..., key_lengths: Tensor | None = ...,
    query_offset: int | Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v, computed as it is written, in the dtype of q.

    Arguments and result are those of `fastattn.attention`; nothing is checked. Takes memory for
    every score, [B, H_q, T_q, T_k]. lse is returned in q's dtype, or fp32 if that is wider.
    """
    B, H_q, T_q, D = q.shape
    _, H_k, T_k, D_v = v.shape
    keep = visible_mask(
        T_q,
        T_k,
        causal=causal,
        window=window,
        key_padding_mask=key_padding_mask,
        key_lengths=key_lengths,
        query_offset=query_offset,
        device=q.device,
    )
    # A key that no query of any head may see must not reach the sums even if it is NaN.
    exists = existing_keys(B, T_k, key_padding_mask, key_lengths, q.device)
    k, v = (x.masked_fill(~exists[:, None, :, None], 0.0) for x in (k, v))

    grouped = q.reshape(B, H_k, H_q // H_k, T_q, D)  # [B, H_k, G, T_q, D]
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, k) * (D**-0.5 if scale is None else scale)
    hidden = ~keep[:, :, None]  # [B or 1, 1, 1, T_q, T_k]
    blind = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, float("-inf")).masked_fill(blind, 0.0)
    weights = scores.softmax(-1).masked_fill(blind, 0.0)
    o = torch.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(B, H_q, T_q, D_v)
    if not return_lse:
        return o
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    lse = wide.logsumexp(-1) if T_k else wide.sum(-1)
    return o, lse.masked_fill(blind[..., 0], float("-inf")).reshape(B, H_q, T_q)


def visible_mask(
    T_q: int,
    T_k: int,
    *,
    causal: bool = False,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [B or 1, 1, T_q, T_k], True where the query (row) sees the key (column).

    causal, T_q = 2, T_k = 4    window=2, the same    window=(0, 1), the same
        1 1 1 0                    0 1 1 0                0 0 1 1
        1 1 1 1                    0 0 1 1                0 0 0 1
    """
    offset = T_k - T_q if query_offset is None else query_offset
    if isinstance(offset, Tensor):
        offset = offset.to(device).reshape(-1, 1, 1, 1)
    rows = torch.arange(T_q, device=device).reshape(1, 1, T_q, 1)
    distance = torch.arange(T_k, device=device).reshape(1, 1, 1, T_k) - (rows + offset)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        keep = keep & (distance <= 0)
    if window is not None:
        before, after = (window - 1, 0) if isinstance(window, int) else window
        if before is not None:
            keep = keep & (-distance <= before)
        if after is not None:
            keep = keep & (distance <= after)
    if key_padding_mask is not None or key_lengths is not None:
        B = (key_padding_mask if key_padding_mask is not None else key_lengths).shape[0]  # type: ignore[union-attr]
        exists = existing_keys(B, T_k, key_padding_mask, key_lengths, device)
        keep = keep & exists[:, None, None, :]
    return keep


def existing_keys(
    B: int,
    T_k: int,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [B, T_k]: keys that are neither padded out nor past their row's length."""
    exists = torch.ones(B, T_k, dtype=torch.bool, device=device)
    if key_padding_mask is not None:
        exists = exists & key_padding_mask
    if key_lengths is not None:
        exists = exists & (torch.arange(T_k, device=device) < key_lengths[:, None])
    return exists
