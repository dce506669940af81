"""Mixture of block attention as a layer."""

from typing import Any

from torch import Tensor

from ... import checks
from ...functional.selected import moba_attention
from .layer import SparseLayer


class MoBAttention(SparseLayer):
    """Causal self-attention to a token's own block and the blocks whose mean keys score highest.

    Lu et al. 2025, arXiv 2502.13189; see `fastattn.functional.selected.moba_attention`. State dicts
    are compatible with `fastattn.CausalGQAttention`.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`.
        block_k: tokens per block.
        n: blocks per token, its own included.
        options: projection, scale and rotation, as for `GQAttention`.

    Examples:
        >>> layer = MoBAttention(64, num_heads=4, num_kv_heads=2, block_k=16, n=2, rotary="half")
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, *,
        block_k: int = 512, n: int = 3, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        self.block_k = checks.check_count("block_k", block_k, 1)
        self.n = checks.check_count("n", n, 1)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how: dict[str, Any] = {"scale": self.scale, "backend": self.backend}
        return moba_attention(q, k, v, block_k=self.block_k, n=self.n, **how)

    def repr_values(self) -> dict[str, Any]:
        return {"block_k": self.block_k, "n": self.n}
