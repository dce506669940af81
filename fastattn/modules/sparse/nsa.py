"""Native sparse attention as a layer."""

from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.selected import native_sparse_attention
from ...functional.selected.choose import check_block_counts, check_pool
from .layer import SparseLayer


class NativeSparseAttention(SparseLayer):
    """Causal self-attention in three branches: compressed, selected and sliding, mixed by gates.

    Yuan et al. 2025, arXiv 2502.11089; see `fastattn.functional.selected.native_sparse_attention`.
    The branches share keys and values, as in the published kernels.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`. Kernels are fast with at
            least 16 heads per K/V head.
        block_k, n: tokens per block, and blocks per token, at least first + latest.
        window: tokens of the sliding branch.
        pool: tokens per compressed key, and the distance between compressed keys.
        first, latest: numbers of first and latest blocks that are always selected.
        options: projection, scale and rotation, as for `GQAttention`.

    Parameters:
        gate_proj: C to 3 H_q, with a bias; sigmoids of it weigh the branches.
        k_pool, v_pool: pool[0] * D to D, and D_v: compress rotated keys and values.
        k_places, v_places: [pool[0], D] and [pool[0], D_v], added before compression; from 0.

    Examples:
        >>> layer = NativeSparseAttention(64, num_heads=4, num_kv_heads=1, block_k=16, n=3,
        ...     window=32, pool=(8, 4), rotary="half")
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, *,
        block_k: int = 64, n: int = 16, window: int = 512, pool: tuple[int, int] = (32, 16),
        first: int = 1, latest: int = 2, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        sizes = {"block_k": block_k, "n": n, "window": window}
        self.how: dict[str, Any] = {x: checks.check_count(x, y, 1) for x, y in sizes.items()}
        n, first, latest = check_block_counts(n, first, latest)
        self.how.update(first=first, latest=latest)
        self.pool = length, _ = check_pool(pool)
        factory: Any = self.factory
        self.gate_proj = nn.Linear(embed_dim, 3 * num_heads, **factory)
        for name, D in (("k", self.head_dim), ("v", self.v_head_dim)):
            self.add_module(f"{name}_pool", nn.Linear(length * D, D, bias=False, **factory))
            places = nn.Parameter(torch.zeros(length, D, **factory))
            self.register_parameter(f"{name}_places", places)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates = self.gate_proj(x).sigmoid().unflatten(2, (-1, 3)).transpose(1, 2)
        return native_sparse_attention(
            q, k, v, self.pooled("k", k), self.pooled("v", v), gates, pool=self.pool,
            scale=self.scale, backend=self.backend, **self.how,
        )  # fmt: skip

    def pooled(self, name: str, x: Tensor) -> Tensor:
        """Compress keys ("k") or values ("v") [B, H_k, T, D] to [B, H_k, T_p, D]."""
        length, step = self.pool
        if x.shape[2] < length:
            return x[:, :, :0]
        places = getattr(self, f"{name}_places")
        stretches = x.unfold(2, length, step).transpose(-1, -2) + places
        pooled: Tensor = getattr(self, f"{name}_pool")(stretches.flatten(-2))
        return pooled

    def repr_values(self) -> dict[str, Any]:
        return {**{name: str(x) for name, x in self.how.items()}, "pool": self.pool}
