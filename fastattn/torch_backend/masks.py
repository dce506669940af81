"""Mask and additive biases of a call as torch tensors."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..options import Options
from . import triton_language


def visible(
    options: Options, B: int, H_q: int, T_q: int, T_k: int, device: torch.device, first_row: int = 0
) -> Tensor | None:
    """bool, broadcasting to [B, H_q, T_q, T_k], as small as possible; None = all visible."""
    near = by_position(options, T_q, T_k, device)
    exists = existing_keys(options, T_k, device)
    return _both(near, by_value(options, exists, B, H_q, T_q, T_k, device, first_row))


def by_value(
    options: Options, exists: Tensor | None, B: int, H_q: int, T_q: int, T_k: int,
    device: torch.device, first_row: int,
) -> Tensor | None:  # fmt: skip
    """The part of `visible` that depends on more than positions. exists: `existing_keys`."""
    keep = _both(options.attn_mask, None if exists is None else exists[:, None, None, :])
    if options.q_documents is not None and options.k_documents is not None:
        same = options.q_documents[:, :, None] == options.k_documents[:, None, :]
        keep = _both(keep, same[:, None])
    if options.mask_mod is not None:
        where = places(options, B, H_q, T_q, T_k, device, first_row)
        shown = triton_language.mask_mod(options.mask_mod, where, options.mod_tensors)
        keep = _both(keep, shown)
    return keep


def _both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
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
    padding = (options.key_lengths, options.key_padding_mask, options.k_documents)
    return any(x is not None for x in padding)


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


class _ByPosition(NamedTuple):
    """keys: their numbers. zeros: as many. None where not needed."""

    near: Tensor | None  # a mask as summand
    ramp: Tensor | None  # distances, which ALiBi multiplies by slopes
    entry: Tensor | None  # of relative_bias, its index
    keys: Tensor
    zeros: Tensor


# Most pairs of queries and keys of tensors that are kept for later calls, and how many are kept.
_SMALL, _KEPT = 2**18, 16


def _positions(
    options: Options, T_q: int, T_k: int, device: torch.device, dtype: torch.dtype,
    is_causal: bool, ramped: bool, entries: int,
) -> _ByPosition:  # fmt: skip
    near = options._replace(causal=False, right=None) if is_causal else options
    keep, ramp, index = by_position(near, T_q, T_k, device), None, None
    if ramped:
        ramp = -distances(options, T_q, T_k, device).abs().to(dtype)
    if entries:
        index = table_index(options, T_q, T_k, entries, device)[:, 0]
    zeros = torch.zeros(T_k, dtype=dtype, device=device)
    keys = torch.arange(T_k, device=device)
    return _ByPosition(None if keep is None else added(keep, dtype), ramp, index, keys, zeros)


@lru_cache(_KEPT)
def _lasting(*of: Any) -> _ByPosition:
    with torch.inference_mode(False):  # no graph could save what inference mode makes
        return _positions(*of)


class AddedScores(NamedTuple):
    """Masks and biases that are added to the scores of calls with the same layouts.

    dtype: q's for a mask, or a bias in it, alone; else fp32 or wider. placing: `Options.placing`,
    if tensors by position are small and kept for later calls. is_causal: the caller adds the right
    edge of the band. ramped, entries: there is ALiBi, relative_bias has so many entries. padded:
    some keys may not exist. chosen: a mask depends on more than positions and keys. biased: there
    is a bias.
    """

    B: int
    H_q: int
    T_q: int
    T_k: int
    device: torch.device
    first_row: int
    dtype: torch.dtype
    placing: Options | None
    is_causal: bool
    ramped: bool
    entries: int
    padded: bool
    chosen: bool
    biased: bool

    def quickly(self, options: Options) -> Tensor | None:
        """Masks and biases as one sum, which broadcasts to [B, H_q, T_q, T_k].

        For eager calls on a CPU. Where a key is hidden, NaN and infinity in a bias stay.
        """
        placed = self._by_position(options)
        x = placed.near
        if self.padded:
            # A sum of numbers takes less time than a choice.
            existing = placed.zeros.masked_fill(self._lacking(options, placed.keys), -math.inf)
            x = existing if x is None else x + existing
        if self.biased:
            x = _bias(options, self.dtype, x, placed)
        if self.chosen:
            keep = by_value(options, None, *self[:6])
            assert keep is not None
            x = added(keep, self.dtype) if x is None else torch.where(keep, x, float("-inf"))
        return x

    def exactly(self, options: Options) -> tuple[Tensor | None, Tensor | None]:
        """(A bias, -inf wherever a key is hidden, or a mask, as `quickly`; the mask alone)."""
        x = keep = visible(options, *self[:6])
        if self.biased:
            x = self.bias(options)
            x = x if keep is None else torch.where(keep, x, float("-inf"))
        return None if x is None else x.expand(-1, -1, self.T_q, self.T_k), keep

    def bias(self, options: Options) -> Tensor:
        """Sum of the biases of a call that has one."""
        return _bias(options, self.dtype, None, self._by_position(options))

    def _lacking(self, options: Options, keys: Tensor) -> Tensor:
        """Keys that do not exist, bool [B, 1, 1, T_k]."""
        lengths = options.key_lengths
        if lengths is not None and options.key_padding_mask is None and options.k_documents is None:
            return keys >= lengths.view(-1, 1, 1, 1)
        exists = existing_keys(options, self.T_k, self.device)
        assert exists is not None
        return exists.logical_not().view(-1, 1, 1, self.T_k)

    def leaves_all(self, options: Options) -> bool:
        """Whether scores are as without masks and biases, wherever queries and keys stand."""
        return options.band == (None, None) and not (self.padded or self.chosen or self.biased)

    def is_complete(self, options: Options) -> bool:
        """Whether masks are by numbers alone, leave each query a key, and hide no bias."""
        if self.padded or self.chosen or options.placing is None:
            return False
        near = by_position(options, self.T_q, self.T_k, self.device)
        return near is None or (not self.biased and bool(near.any(-1).all()))

    def _by_position(self, options: Options) -> _ByPosition:
        of = (self.T_q, self.T_k, self.device, self.dtype, self.is_causal)
        if self.placing is None:
            return _positions(options, *of, self.ramped, self.entries)
        return _lasting(self.placing, *of, self.ramped, self.entries)


def added_scores(
    q: Tensor, T_k: int, options: Options, first_row: int = 0, *, lasting: bool = False,
    is_causal: bool = False,
) -> AddedScores:  # fmt: skip
    """`AddedScores` of a call; lasting: its positions are kept for later ones."""
    (B, H_q, T_q, _), table = q.shape, options.relative_bias
    masks = (options.attn_mask, options.q_documents, options.mask_mod)
    return AddedScores(
        *(B, H_q, T_q, T_k, q.device, first_row, dtype_of_bias(q, options)),
        placing=options.placing if lasting and T_q * T_k <= _SMALL else None,
        is_causal=is_causal,
        ramped=options.alibi_slopes is not None,
        entries=0 if table is None else table.shape[1],
        padded=lacks_keys(options),
        chosen=any(x is not None for x in masks),
        biased=options.biases or options.attn_bias is not None,
    )


def _bias(options: Options, dtype: torch.dtype, x: Tensor | None, placed: _ByPosition) -> Tensor:
    """Sum of x and the biases."""
    if placed.ramp is not None and options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(dtype)[..., None, None]
        x = slopes * placed.ramp if x is None else torch.addcmul(x, slopes, placed.ramp)
    if placed.entry is not None and options.relative_bias is not None:
        shift = options.relative_bias.to(dtype)[:, placed.entry].transpose(0, 1)
        x = shift if x is None else x + shift
    if options.attn_bias is not None:
        bias = options.attn_bias.to(dtype)
        x = bias if x is None else x + bias
    assert x is not None
    return x


def copies(options: Options, B: int, H_q: int) -> int:
    """Upper bound of the masks [T_q, T_k] that are made for torch's function."""
    bias, mask = options.attn_bias, options.attn_mask
    if bias is not None and bias.requires_grad:  # torch's formula
        return B * H_q
    given = [x for x in (bias, mask) if x is not None]
    every = options.biases or options.mask_mod is not None
    by_row = every or lacks_keys(options) or options.placing is None
    if mask is None and not by_row and options.band == (None, None):
        return 0  # torch gets the bias itself
    sizes = [(B if by_row else 1, H_q if every else 1), *(x.shape[:2] for x in given)]
    return math.prod(map(max, zip(*sizes, strict=True)))


def dtype_of_bias(q: Tensor, options: Options) -> torch.dtype:
    """`AddedScores.dtype`."""
    bias = options.attn_bias
    if not options.biases and (bias is None or bias.dtype == q.dtype):
        return q.dtype
    return torch.promote_types(q.dtype, torch.float32)


def added(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as summand: 0, or -inf where it is False."""
    return torch.zeros_like(keep, dtype=dtype).masked_fill_(~keep, float("-inf"))
