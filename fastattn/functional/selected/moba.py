"""Mixture of block attention (Lu et al. 2025, arXiv 2502.13189)."""

from torch import Tensor

from ... import checks
from .block_sparse_attention import selected_attention
from .choose import select_blocks


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_k: int = 512,
    n: int = 3,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of each query and head to its own block and n - 1 earlier ones.

    The blocks with the largest q . mean(k of the block) are selected.

    Args:
        q: [B, H_q, T, D].
        k, v: [B, H_k, T, D] and [B, H_k, T, D_v].
        block_k: tokens of a block.
        n: blocks of a query, including its own.
        scale, backend: as for `attention`.

    Returns:
        [B, H_q, T, D_v], differentiable in q, k and v; the selection has no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.check_tensors(q, k, v)
    checks.check_qkv(q, k, v)
    block_k = checks.check_count("block_k", block_k, 1)
    # Only its own queries see an incomplete last block.
    some = k.shape[2] >= block_k
    means = k.detach().unfold(2, block_k, block_k).mean(-1) if some else k[:, :, :0].detach()
    indices = select_blocks(
        q, means, n, block_k=block_k, pool=(block_k, block_k), lists=q.shape[1], backend=backend
    )
    return selected_attention(
        q, k, v, indices, block=(1, block_k), causal=True, scale=scale, backend=backend
    )
