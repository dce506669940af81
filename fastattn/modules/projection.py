"""Projections of self-attention: normalised and rotated queries, keys and values."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..rotary import RotaryPositions, RotaryStyle, rotated
from .checks import LayerCache, check_rotary
from .fused_weights import Fused
from .layer import AttentionLayer
from .sharded import local_part


class SelfProjection(AttentionLayer):
    """An `AttentionLayer` that projects queries, keys and values from the same tokens.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`.
        options: all `SelfOptions`, from `fastattn.modules.options.complete`.

    Parameters:
        q_proj.weight, k_proj.weight, v_proj.weight: [H_q D, C], [H_k D, C] and [H_k D_v, C], rows
            head by head.
    """

    fused_projections: ClassVar[Fused] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    rotary: RotaryStyle | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        self.rotary, base = options["rotary"], options["rotary_base"]
        rotary_dim, D = options["rotary_dim"], self.head_dim
        check_rotary(D, self.rotary, base, rotary_dim)
        self.rotary_dim: int = D if rotary_dim is None else rotary_dim
        self.rotary_positions = (
            None if self.rotary is None else RotaryPositions(self.rotary_dim, base=base)
        )
        factory: dict[str, Any] = {name: options[name] for name in ("device", "dtype")}
        factory["bias"] = options["qkv_bias"]
        self.q_proj = nn.Linear(embed_dim, num_heads * D, **factory)
        self.k_proj = nn.Linear(embed_dim, self.num_kv_heads * D, **factory)
        self.v_proj = nn.Linear(embed_dim, self.num_kv_heads * self.v_head_dim, **factory)

    @property
    def rotary_base(self) -> float | None:
        """Base of the rotary embedding, which is that of `rotary_positions`; None without one."""
        return None if self.rotary_positions is None else self.rotary_positions.base

    def rotation(
        self,
        x: Tensor,
        positions: Tensor | None,
        tables: RotaryPositions | tuple[Tensor, Tensor] | None,
    ) -> RotaryPositions | tuple[Tensor, Tensor] | None:
        """Choose the tables that rotate x; None = no rotation."""
        own = self.rotary_positions
        if positions is None or own is None:
            return own if tables is None else tables
        return own.of(positions, x.device)

    def queries_keys_values(
        self,
        x: Tensor,
        tables: RotaryPositions | tuple[Tensor, Tensor] | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H_q, T, D], [B, H_k, T, D] and [B, H_k, T, D_v], normalised and rotated."""
        q, k, v = self.project(x)
        if isinstance(tables, RotaryPositions):
            T = x.shape[1]
            if cache is None:
                tables = tables.at(0, T, T, x.device)
            else:
                n = cache.uniform_length
                first = cache.lengths if n is None else n
                tables = tables.at(first, T, cache.length_bound + T, x.device)
        if tables is not None and self.rotary is not None:
            # Rotating q and k together halves the host's operations, for one copy.
            qk = rotated(torch.cat((q, k), dim=1), *tables, self.rotary)
            q, k = torch.split_with_sizes(qk, [q.shape[1], k.shape[1]], dim=1)
        return q, k, v

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H_q, T, D], [B, H_k, T, D] and [B, H_k, T, D_v], normalised, not rotated."""
        q, k = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        v = self.split_heads(self.v_proj(x), self.v_head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.scoring == "multiplicative":
            q = q @ local_part(self.score_weight).mT
        return q, k, v
