"""Queries, keys and values of self-attention: one projection of the tokens, normalised, rotated."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..rotary import RotaryPositions, RotaryStyle, apply_rotary, rotary_tables
from .checks import LayerCache, check_rotary
from .layer import AttentionLayer


class SelfProjection(AttentionLayer):
    """An `AttentionLayer` whose queries, keys and values are of the same tokens.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`.
        options: all of `SelfOptions`, from `fastattn.modules.options.complete`.

    Parameters:
        qkv_proj.weight: [(H_q + H_k) D + H_k D_v, C], the rows of q, then k, then v, by heads.
    """

    rotary: RotaryStyle | None
    rotary_base: float

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        self.rotary, self.rotary_base = options["rotary"], options["rotary_base"]
        rotary_dim, D = options["rotary_dim"], self.head_dim
        check_rotary(D, self.rotary, self.rotary_base, rotary_dim)
        self.rotary_dim: int = D if rotary_dim is None else rotary_dim
        self.rotary_positions = (
            None if self.rotary is None else RotaryPositions(self.rotary_dim, base=self.rotary_base)
        )
        rows = (num_heads + self.num_kv_heads) * D + self.num_kv_heads * self.v_head_dim
        factory: dict[str, Any] = {"device": options["device"], "dtype": options["dtype"]}
        self.qkv_proj = nn.Linear(embed_dim, rows, bias=options["qkv_bias"], **factory)

    def rotation(
        self,
        x: Tensor,
        positions: Tensor | None,
        tables: RotaryPositions | tuple[Tensor, Tensor] | None,
    ) -> RotaryPositions | tuple[Tensor, Tensor] | None:
        """What x is rotated by; None = nothing."""
        if positions is None or self.rotary is None:
            return self.rotary_positions if tables is None else tables
        return rotary_tables(positions, self.rotary_dim, base=self.rotary_base, device=x.device)

    def queries_keys_values(
        self,
        x: Tensor,
        tables: RotaryPositions | tuple[Tensor, Tensor] | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H_q, T, D], [B, H_k, T, D] and [B, H_k, T, D_v], normalised and rotated."""
        qk, v = self.project(x)
        if isinstance(tables, RotaryPositions):
            T = x.shape[1]
            if cache is None:
                tables = tables.at(0, T, T, x.device)
            else:
                n = cache.uniform_length
                first = cache.lengths if n is None else n
                tables = tables.at(first, T, cache.length_bound + T, x.device)
        if tables is not None and self.rotary is not None:
            qk = apply_rotary(qk, *tables, style=self.rotary)
        return *self.split_queries_keys(qk), v

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q and k behind one another, [B, H_q + H_k, T, D], and v, normalised, not rotated."""
        H_q, H_k = self.num_heads, self.num_kv_heads
        qk, v = self.split_keys_values(self.qkv_proj(x), H_q + H_k)
        if self.qk_norm or self.scoring == "multiplicative":
            q, k = self.split_queries_keys(qk)
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            if self.scoring == "multiplicative":
                q = q @ self.score_weight.mT
            qk = torch.cat((q, k), dim=1)
        return qk, v

    def split_queries_keys(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Heads of q and of k."""
        q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=1)
        return q, k
