"""The mask of a call, and what is added to its scores, as torch tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..options import Options
from . import triton_language


def visible(
    options: Options,
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    device: torch.device,
    *,
    first_row: int = 0,
) -> Tensor | None:
    """bool, broadcasting to [B, H_q, T_q, T_k], as small as possible; None = all visible."""
    near = by_position(options, T_q, T_k, device)
    exists = existing_keys(options, T_k, device)
    return both(near, by_value(options, exists, B, H_q, T_q, T_k, device, first_row=first_row))


def by_value(
    options: Options,
    exists: Tensor | None,
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    device: torch.device,
    *,
    first_row: int = 0,
) -> Tensor | None:
    """The part of `visible` that hangs on more than positions. exists: `existing_keys`."""
    keep = both(options.attn_mask, None if exists is None else exists[:, None, None, :])
    if options.q_documents is not None and options.k_documents is not None:
        same = options.q_documents[:, :, None] == options.k_documents[:, None, :]
        keep = both(keep, same[:, None])
    if options.mask_mod is not None:
        where = places(options, B, H_q, T_q, T_k, device, first_row)
        shown = triton_language.mask_mod(options.mask_mod, where, options.mod_tensors)
        keep = both(keep, shown)
    return keep


def both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x & y; None = all True."""
    return y if x is None else x if y is None else x & y


def by_position(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor | None:
    """Mask by position: bool [B or 1, 1, T_q, T_k], or None if all is visible."""
    if options.band is None:
        return _pattern(options, T_q, T_k, device)
    (left, right), offset = options.band, options.query_offset
    if left is None and right is None:
        return None
    if options.query_offsets is not None or options.q_positions is not None or offset is None:
        return _window(distances(options, T_q, T_k, device), left, right)
    if sees_all(options, T_q, T_k):
        return None
    near = torch.ones(1, 1, T_q, T_k, dtype=torch.bool, device=device)
    if right is not None:
        near = near.tril(offset + right)
    return near if left is None else near.triu(offset - left)


def sees_all(options: Options, T_q: int, T_k: int) -> bool:
    """Whether the band alone hides no key, as from the query of a decoding step."""
    if options.band is None or options.query_offset is None:
        return False
    (left, right), offset = options.band, options.query_offset
    reaches_last = right is None or offset + right >= T_k - 1
    return reaches_last and (left is None or T_q - 1 + offset - left <= 0)


def _window(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    near = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        near = near & (distance >= -right)
    return near if left is None else near & (distance <= left)


def _pattern(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor:
    """Mask by patterns other than a band: strides, kept first keys, bidirectional prefixes."""
    distance = distances(options, T_q, T_k, device)
    key = _key_positions(options, T_k, device)
    near = _window(distance, options.left, options.right)
    if options.stride is not None:
        if options.left is None and options.right is None:
            near = torch.zeros_like(near)
        near = near | (distance % options.stride == 0)
    if options.keep_first:
        near = near | (key < options.keep_first)
    if options.causal:
        past = distance >= 0
        if options.prefix_lengths is not None:
            past = past | (key < options.prefix_lengths[:, None, None, None])
        near = near & past
    return near


def lacks_keys(options: Options) -> bool:
    """Whether some keys may be padding."""
    given = (options.key_lengths, options.key_padding_mask, options.k_documents)
    return any(x is not None for x in given)


def existing_keys(options: Options, T_k: int, device: torch.device) -> Tensor | None:
    """bool [B, T_k]: keys except padding; None = all exist."""
    exists = options.key_padding_mask
    if options.key_lengths is not None:
        inside = torch.arange(T_k, device=device) < options.key_lengths[:, None]
        exists = inside if exists is None else exists & inside
    if options.k_documents is not None:
        real = options.k_documents >= 0
        exists = real if exists is None else exists & real
    return exists


def distances(options: Options, T_q: int, T_k: int, device: torch.device) -> Tensor:
    """p - j, int64 [B or 1, 1, T_q, T_k]."""
    return _query_positions(options, T_q, device) - _key_positions(options, T_k, device)


def _query_positions(options: Options, T_q: int, device: torch.device) -> Tensor:
    """Position of each query among the keys, int64 [B or 1, 1, T_q, 1]."""
    if options.q_positions is not None:
        return options.q_positions.long()[:, None, :, None]
    rows = torch.arange(T_q, device=device)[None, None, :, None]
    if options.query_offsets is not None:
        offsets = options.query_offsets.clamp(-checks.FARTHEST, checks.FARTHEST)
        return rows + offsets[:, None, None, None]
    assert options.query_offset is not None, "packed calls are split before"
    return rows + options.query_offset


def _key_positions(options: Options, T_k: int, device: torch.device) -> Tensor:
    """Position of each key, int64 [B or 1, 1, 1, T_k]."""
    if options.k_positions is not None:
        return options.k_positions.long()[:, None, None, :]
    return torch.arange(T_k, device=device)[None, None, None]


def table_index(options: Options, T_q: int, T_k: int, entries: int, device: torch.device) -> Tensor:
    """Index in a table of 2 R + 1 distances: int64 [B or 1, 1, T_q, T_k]."""
    R = entries // 2
    return distances(options, T_q, T_k, device).clamp(-R, R) + R


def places(
    options: Options, B: int, H_q: int, T_q: int, T_k: int, device: torch.device, first_row: int
) -> triton_language.Places:
    """Indices of a call's scores, for the user's functions."""
    q_pos = _query_positions(options, T_q, device).to(torch.int32)
    k_pos = _key_positions(options, T_k, device).to(torch.int32)
    return triton_language.Places(first_row, B, options.first_head, H_q, q_pos, k_pos)


# Tensors that follow from positions alone, by name: those of the calls that keep them.
Kept = dict[str, Tensor | None]


def _kept(kept: Kept | None, name: str, make: Callable[[], Tensor | None]) -> Tensor | None:
    """The tensor of this name, made at its first use."""
    if kept is None:
        return make()
    if name not in kept:
        with torch.inference_mode(False):  # no graph could save what inference mode makes
            kept[name] = make()
    return kept[name]


def bias(
    options: Options, T_q: int, T_k: int, device: torch.device, dtype: torch.dtype,
    near: Tensor | None = None, kept: Kept | None = None,
) -> Tensor | None:  # fmt: skip
    """Sum in `dtype` of what is added to scores, broadcasting to [B, H_q, T_q, T_k]; None: nothing.

    near: the first summand. ALiBi adds -slope |p - j|, relative_bias its entry for p - j.
    """
    x = near
    if options.alibi_slopes is not None:
        ramp = _kept(kept, "ramp", lambda: -distances(options, T_q, T_k, device).abs().to(dtype))
        slopes = options.alibi_slopes.to(dtype)[..., None, None]
        x = slopes * ramp if x is None else torch.addcmul(x, slopes, ramp)
    if options.relative_bias is not None:
        table = options.relative_bias.to(dtype)
        entries = table.shape[1]
        index = _kept(kept, "index", lambda: table_index(options, T_q, T_k, entries, device)[:, 0])
        shift = table[:, index].transpose(0, 1)
        x = shift if x is None else x + shift
    if options.attn_bias is not None:
        x = options.attn_bias.to(dtype) if x is None else x + options.attn_bias.to(dtype)
    return x


def quickly(
    q: Tensor, k: Tensor, options: Options, first_row: int, kept: Kept | None
) -> tuple[Tensor | None, bool]:
    """(A mask or bias broadcasting to [B, H_q, T_q, T_k], whether it hides keys).

    NaN and infinity in a hidden bias stay. kept: of calls like this one.
    """
    (B, H_q, T_q, _), T_k, dtype = q.shape, k.shape[2], dtype_of_bias(q, options)
    near = _kept(kept, "near", lambda: added(by_position(options, T_q, T_k, q.device), dtype))
    if lacks_keys(options):
        # A sum of numbers takes less time than a choice.
        existing = _existing(options, T_k, q.device, dtype, kept)
        near = existing if near is None else near + existing
    keep = by_value(options, None, B, H_q, T_q, T_k, q.device, first_row=first_row)
    x = bias(options, T_q, T_k, q.device, dtype, near, kept)
    return _with_mask(x, keep, T_q, T_k), keep is not None or near is not None


def _existing(
    options: Options, T_k: int, device: torch.device, dtype: torch.dtype, kept: Kept | None
) -> Tensor:
    """[B, 1, 1, T_k]: 0, or -inf at keys of padding."""
    zeros = _kept(kept, "zeros", lambda: torch.zeros(T_k, dtype=dtype, device=device))
    lengths = options.key_lengths
    if lengths is not None and options.key_padding_mask is None and options.k_documents is None:
        keys = _kept(kept, "keys", lambda: torch.arange(T_k, device=device))
        hidden = keys >= lengths.view(-1, 1, 1, 1)
    else:
        exists = existing_keys(options, T_k, device)
        hidden = exists.logical_not().unsqueeze(1).unsqueeze(1)
    return zeros.masked_fill(hidden, float("-inf"))


def exactly(
    q: Tensor, k: Tensor, options: Options, first_row: int
) -> tuple[Tensor | None, Tensor | None]:
    """(What `quickly` returns, -inf wherever a key is hidden, and the mask alone, as bool)."""
    (B, H_q, T_q, _), T_k = q.shape, k.shape[2]
    keep = visible(options, B, H_q, T_q, T_k, q.device, first_row=first_row)
    x = bias(options, T_q, T_k, q.device, dtype_of_bias(q, options))
    return _with_mask(x, keep, T_q, T_k), keep


def dtype_of_bias(q: Tensor, options: Options) -> torch.dtype:
    """q's dtype for a mask, or a bias in it, alone; else fp32 or wider."""
    given = options.attn_bias
    if not options.biases and (given is None or given.dtype == q.dtype):
        return q.dtype
    return torch.promote_types(q.dtype, torch.float32)


def added(keep: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as summand: 0, or -inf where it is False."""
    if keep is None:
        return None
    return torch.zeros_like(keep, dtype=dtype).masked_fill_(~keep, float("-inf"))


def _with_mask(x: Tensor | None, keep: Tensor | None, T_q: int, T_k: int) -> Tensor | None:
    if x is not None and keep is not None:
        x = torch.where(keep, x, float("-inf"))
    x = keep if x is None else x
    return None if x is None else x.expand(*x.shape[:2], T_q, T_k)
