"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary, over `fastattn.rotary`.

Positions count along dim 1, tables are [positions, R / 2], and the first R channels of a head
rotate: interleaved pairs channels 2 i and 2 i + 1, else i and i + R / 2. As in flash-attn,
positions past the tables are not rotated. seqlen_offsets: of the first token, an int or integers
[B].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import rotary
from ...position_tables import document_ids

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate x [B, T, H, D], or packed [total, H, D] with cu_seqlens, to its positions.

    Args:
        cu_seqlens: integers [B + 1], where each packed sequence starts, and the total.
        max_seqlen: not needed.
        inplace: write into x, and return it.
        conjugate: rotate in the opposite direction.

    Returns:
        As x, without a gradient; `apply_rotary_emb` has one.

    Raises:
        ValueError: shapes disagree, or an int of seqlen_offsets leads past the tables.
    """
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims or cos.dim() != 2:
        raise ValueError(
            f"x must have {dims} dimensions and cos 2, got {list(x.shape)} and {list(cos.shape)}"
        )
    at = _positions(x, seqlen_offsets, cu_seqlens, cos.shape[0])
    cos, sin = table_rows(cos, -sin if conjugate else sin, at)
    turned = apply_rotary_emb_torch(x if dims == 4 else x[None], cos, sin, interleaved).view(
        x.shape
    )
    return x.copy_(turned) if inplace else turned


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotate x [B, T, H, D] by tables [T, R / 2] or [B, T, R / 2]; differentiable in all three."""
    style: Any = "interleaved" if interleaved else "half"
    return rotary.apply_rotary(x.transpose(1, 2), cos, sin, style=style).transpose(1, 2)


def table_rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., R / 2] of both tables at integer positions [...]; identity past their end."""
    in_table = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
    row = positions.clamp(0, cos.shape[0] - 1).long()
    return torch.where(in_table, cos[row], 1.0), torch.where(in_table, sin[row], 0.0)


def _positions(x: Tensor, first: int | Tensor, cu_seqlens: Tensor | None, bound: int) -> Tensor:
    """Positions of all tokens: [T] or [B, T]; [1, total] for packed sequences."""
    T = x.shape[1 if cu_seqlens is None else 0]
    steps = torch.arange(T, device=x.device)
    if cu_seqlens is not None:
        row = document_ids(cu_seqlens, T).long()
        return steps - cu_seqlens[row] + (first[row] if isinstance(first, Tensor) else first)
    if isinstance(first, int) and first + T > bound:
        raise ValueError(
            f"cos and sin must have a row for each of {first} + {T} positions, got {bound}"
        )
    return steps + (first.unsqueeze(1) if isinstance(first, Tensor) else first)


class _Turned(torch.autograd.Function):
    """Rotation of x, maybe in place; its backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Callable[..., Tensor]) -> Tensor:
        ctx.turn = turn
        return turn(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.turn(grads[0].clone(), conjugate=True), None


_turned: Any = _Turned.apply


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`apply_rotary`, differentiable in x."""
    how: dict[str, Any] = {"interleaved": interleaved, "inplace": inplace}
    how |= {"seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens}
    turned: Tensor = _turned(x, partial(apply_rotary, cos=cos, sin=sin, **how))
    return turned


apply_rotary_emb_func = apply_rotary_emb


def _turned_in_place(
    x: Tensor,
    sizes: tuple[int, ...],
    tables: tuple[Tensor, ...],
    first: int | Tensor,
    interleaved: bool,
) -> Tensor:
    """Rotate parts of dim 2 in place, one for each pair of tables; further parts are v."""

    def turn(x: Tensor, *, conjugate: bool = False) -> Tensor:
        parts = [part.squeeze(2) if x.dim() == 5 else part for part in torch.split(x, [*sizes], 2)]
        for part, cos, sin in zip(parts, tables[::2], tables[1::2], strict=False):
            apply_rotary(part, cos, sin, first, None, None, interleaved, True, conjugate)
        return x

    turned: Tensor = _turned(x, turn)
    return turned


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of qkv in place, k by cos_k and sin_k, default cos and sin.

    Args:
        qkv: [B, T, 3, H, D], or [B, T, H_q + 2 H_k, D] with num_heads_q = H_q.

    Returns:
        qkv, differentiable.
    """
    sizes: tuple[int, ...] = (1, 1, 1)
    if qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        sizes = (num_heads_q, *((qkv.shape[2] - num_heads_q) // 2,) * 2)
    elif qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            "qkv must have shape [B, T, 3, H, D], or [B, T, H_q + 2 H_k, D] with num_heads_q, "
            f"got {list(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    tables = (cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    return _turned_in_place(qkv, sizes, tables, seqlen_offsets, interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k of kv [B, T, 2, H, D] in place; returns kv, differentiable."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must have shape [B, T, 2, H, D], got {list(kv.shape)}")
    return _turned_in_place(kv, (1, 1), (cos, sin), seqlen_offsets, interleaved)


class RotaryEmbedding(nn.Module):
    """Rotary embedding of qkv in place, with tables that grow as needed.

    With scale_base also xPos (Sun et al., 2022, arXiv 2212.10554): tables of queries are multiplied
    by zeta ** ((position - T // 2) / scale_base), tables of keys divided by it, where zeta_i = (2 i
    + 0.4 dim) / (1.4 dim).

    Args:
        dim: R, rotated channels of a head.
        base: of the frequencies: the slowest pair rotates by about 1 / base a position.
        interleaved: channels 2 i and 2 i + 1 are a pair, else i and i + R / 2.
        scale_base: of xPos; None = no scales.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        for name, x in zip(("inv_freq", "scale"), self._of_pairs(device), strict=True):
            self.register_buffer(name, x, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _of_pairs(self, device: torch.device | str | None) -> tuple[Tensor, Tensor | None]:
        """Frequencies and scales of the pairs, fp32 [R / 2]."""
        channels = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        scale = None if self.scale_base is None else (channels + 0.4 * self.dim) / (1.4 * self.dim)
        return self.base ** (-channels / self.dim), scale

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Extend the tables to positions 0..seqlen - 1."""
        kept = self._cos_cached
        usable = kept is not None and (kept.device, kept.dtype) == (device, dtype)
        usable = usable and not (self.training and kept is not None and kept.is_inference())
        if usable and seqlen <= self._seq_len_cached:
            return
        self._seq_len_cached = seqlen
        inv_freq, of_pairs = self.inv_freq.to(device), self.scale
        if inv_freq.dtype != torch.float32:
            # The module was cast, which rounds its buffers.
            inv_freq, of_pairs = self._of_pairs(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = torch.outer(positions, inv_freq)
        cos, sin = angle.cos(), angle.sin()
        if of_pairs is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = of_pairs.to(device) ** ((positions - seqlen // 2) / self.scale_base).unsqueeze(1)
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Args:
            qkv: as for `apply_rotary_emb_qkv_`; with kv, q [B, T, H, D].
            kv: [B, T, 2, H, D].
            seqlen_offset: position of the first token, an int or integers [B].
            max_seqlen: length of the tables; needed if seqlen_offset is a tensor and positions
                exceed T.
        """
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen must be given with seqlen_offset as a tensor")
        cos_k, sin_k, how = (
            self._cos_k_cached,
            self._sin_k_cached,
            (self.interleaved, seqlen_offset),
        )
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *how, num_heads_q)
        q = _turned_in_place(qkv, (qkv.shape[2],), (cos, sin), seqlen_offset, self.interleaved)
        if cos_k is not None and sin_k is not None:
            cos, sin = cos_k, sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, *how)
