"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089): three gated branches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks, tracing
from ...ops import spread
from ..fused_attention import attention
from .block_sparse_attention import selected_attention
from .choose import check_pool, select_blocks


def pooled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: tuple[int, int],
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to pooled keys: key i, of tokens i * pool[1] to i * pool[1] + pool[0] - 1, is
    visible from its last token on.

    Args:
        q: [B, H_q, T, D], of all tokens.
        k, v: [B, H_k, T_k, D] and [B, H_k, T_k, D_v].
        pool: (tokens of a key, stride).
        scale, backend: as for `attention`, which computes it: each of the pool[1] residues of query
            positions is a causal call. q and o are copied once.

    Returns:
        (o [B, H_q, T, D_v], lse fp32 [B, H_q, T]), both differentiable; 0 and -inf before the end
        of the first key.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    spread.refuse("pooled_attention")
    checks.check_tensors(q, k, v)
    checks.check_qkv(q, k, v, dtype="")
    length, step = check_pool(pool)
    H_q, T = q.shape[1:3]
    front = -(length - 1) % step
    behind = (length - 1 + front) // step
    rows = tracing.ceil_div(T + front, step)
    padded = F.pad(q, (0, 0, front, rows * step - T - front))
    apart = torch.unflatten(padded, 2, (rows, step)).transpose(2, 3).flatten(1, 2)
    o, lse = attention(
        apart, k, v, causal=True, query_offset=-behind, scale=scale, backend=backend,
        return_lse=True,
    )  # fmt: skip
    o = torch.unflatten(o, 1, (H_q, step)).transpose(2, 3).flatten(2, 3)[:, :, front : front + T]
    lse = torch.unflatten(lse, 1, (H_q, step)).transpose(2, 3).flatten(2)[:, :, front : front + T]
    # Inductor copies what a backward reads, and would keep the copy's strides for all lengths.
    return (o.contiguous(), lse) if torch.compiler.is_compiling() else (o, lse)


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pooled: Tensor,
    v_pooled: Tensor,
    gates: Tensor,
    *,
    block_k: int = 64,
    n: int = 16,
    window: int = 512,
    pool: tuple[int, int] = (32, 16),
    first: int = 1,
    latest: int = 2,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """g_0 * compressed + g_1 * selected + g_2 * sliding attention, causal.

    Compressed: to pooled keys (`pooled_attention`). Selected: to the n blocks with the largest
    compressed weights, summed over the heads of a K/V head, always including the first and the
    latest (`select_blocks`). Sliding: to the last `window` tokens.

    Args:
        q: [B, H_q, T, D].
        k, v: [B, H_k, T, D] and [B, H_k, T, D_v], of the selected and the sliding branch.
        k_pooled, v_pooled: [B, H_k, T_p, D] and [B, H_k, T_p, D_v], one per pool[0] tokens with
            stride pool[1]: T_p = (T - pool[0]) // pool[1] + 1.
        gates: [B, H_q, T, 3], such as sigmoids.
        block_k, n, window, pool, first, latest: see above.
        scale, backend: as for `attention`.

    Returns:
        [B, H_q, T, D_v], differentiable in all tensors; the selection has no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.check_tensors(q, k, v)
    sizes = checks.check_qkv(q, k, v, dtype="")
    length, step = check_pool(pool)
    sizes["T_p"] = max(0, (sizes["T_q"] - length) // step + 1)
    checks.check_input("gates", gates, "", "B H_q T_q 3", q, sizes)
    checks.check_input("k_pooled", k_pooled, "", "B H_k T_p D", q, sizes)
    checks.check_input("v_pooled", v_pooled, "", "B H_k T_p D_v", q, sizes)
    compressed, lse = pooled_attention(q, k_pooled, v_pooled, pool, scale=scale, backend=backend)
    indices = select_blocks(
        q, k_pooled, n, block_k=block_k, lse=lse, pool=pool, first=first, latest=latest,
        scale=scale, backend=backend,
    )  # fmt: skip
    block = (1, block_k)
    selected = selected_attention(
        q, k, v, indices, block=block, causal=True, scale=scale, backend=backend
    )
    sliding = attention(q, k, v, causal=True, window=window, scale=scale, backend=backend)
    branches = zip(gates.unbind(-1), (compressed, selected, sliding), strict=True)
    return sum((gate[..., None] * o for gate, o in branches), start=sliding.new_zeros(()))
