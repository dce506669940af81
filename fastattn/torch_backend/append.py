"""Append to a cache in plain torch, as `kernels.append`."""

from typing import Any

import torch
from torch import Tensor

from ..cache_view import CacheView, as_bytes
from ..quantization import Quantize, codes_within, quantize_rows
from ..rotary import RotaryStyle, apply_rotary

# Index of pages and slots in [P, S, H_k, width].
_Place = tuple[Any, Any]


def append_rows(
    view: CacheView,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    new_lengths: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    style: RotaryStyle,
    *,
    advance: bool,
    first_slot: int | None,
    room_for_padding: bool,
) -> Tensor | None:
    """Write T tokens per row in place; see `cache.append.append`.

    v: None where keys hold the values.
    room_for_padding: padding may be written too, as every row has slots for T tokens.
    """
    T = k.shape[2]
    index: _Place
    count: int | Tensor
    if first_slot is not None and advance:
        slots = slice(first_slot, first_slot + T)
        index, real, count = (slice(None), slots), None, T
        if rotary is not None:
            q, k = _rotated(q, k, rotary[0][slots], rotary[1][slots], style)
    else:
        lengths = view.of_batch(view.lengths).long()
        count = torch.full_like(lengths, T) if new_lengths is None else new_lengths.clamp(0, T)
        first = lengths if advance else lengths - count
        positions = first.unsqueeze(1) + torch.arange(T, device=k.device)  # [B, T]
        if rotary is not None:
            q, k = _turned(q, k, positions, rotary, style, room_for_padding)
        index, real = view.locate(positions), None
        if not room_for_padding:
            real = _stored_tokens(view, positions, (first + count).unsqueeze(1))
    scaled = view.given_scales
    _store(view.k, view.k_scale, k, index, real, scaled)
    if v is not None:
        _store(view.v, view.v_scale, v, index, real, scaled)
    if advance:
        if isinstance(count, int) or view.batch_index is None:
            view.lengths.add_(count)
        else:
            view.lengths.index_add_(0, view.batch_index, count.to(view.lengths.dtype))
    return q


def append_to_slots(
    buffers: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    positions: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    style: RotaryStyle,
    *,
    given_scales: bool,
) -> Tensor | None:
    """Write k and v [1, H_k, T, width] to slots of K, V and their scales, in place; return rotated
    q.

    Invalid slots are skipped, which waits for the device.
    """
    k_pages, v_pages, k_scale, v_scale = buffers
    if rotary is not None and positions is not None:
        q, k = _turned(q, k, positions[None], rotary, style, False)
    P, _, S, _ = k_pages.shape
    real = ((slots >= 0) & (slots < P * S))[None]
    index = ((slots // S)[None], (slots % S)[None])
    _store(k_pages, k_scale, k, index, real, given_scales)
    if v is not None:
        _store(v_pages, v_scale, v, index, real, given_scales)
    return q


def _turned(
    q: Tensor | None, k: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor],
    style: RotaryStyle, reached: bool,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Rotate q and k [B, H, T, D] to positions [B, T]; reached: the tables cover all of them."""
    row = positions.clamp(0, rotary[0].shape[0] - 1)
    cos, sin = rotary[0][row], rotary[1][row]
    if not reached:
        # Positions past the tables are not rotated.
        has_table = (row == positions).unsqueeze(-1)
        cos, sin = torch.where(has_table, cos, 1.0), torch.where(has_table, sin, 0.0)
    return _rotated(q, k, cos, sin, style)


def _rotated(
    q: Tensor | None, k: Tensor, cos: Tensor, sin: Tensor, style: RotaryStyle
) -> tuple[Tensor | None, Tensor]:
    turned = None if q is None else apply_rotary(q, cos, sin, style=style)
    return turned, apply_rotary(k, cos, sin, style=style)


def _stored_tokens(view: CacheView, positions: Tensor, end: Tensor) -> Tensor:
    """bool [B, T]: tokens to write, in rows with `end` [B, 1] tokens afterwards."""
    stored = (positions < end) & view.has_place(positions)
    if view.keep_first is not None:
        # In a long append, skip tokens that later ones overwrite.
        lasting = positions >= end - (view.page_size - view.keep_first)
        stored = stored & (lasting | (positions < view.keep_first))
    return stored


def _store(
    stored: Tensor, stored_scale: Tensor | None, x: Tensor, index: _Place, real: Tensor | None,
    given_scale: bool,
) -> None:  # fmt: skip
    """Write x [B, H_k, T, width] to the slots, as codes if there are scales."""
    x = x.transpose(1, 2)
    if real is not None:
        x, index = x[real], (index[0][real], index[1][real])
    if stored_scale is not None:
        kind: Quantize = "int8" if stored.dtype == torch.int8 else "fp8"
        of_slots = stored_scale.transpose(1, 2)
        if given_scale:
            x = codes_within(x, of_slots[index].unsqueeze(-1), kind)
        else:
            x, of_slots[index] = quantize_rows(x, kind)
    as_bytes(stored).transpose(1, 2)[index] = as_bytes(x)
