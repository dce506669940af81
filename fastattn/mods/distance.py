"""Biases by distance and by forget gates, as options with gradients.

    alibi_bias, slope 1     forgetting_bias, gates of 1/2, causal; in log2, up to a row's constant
     0 .  .  .              0 .  .  .
    -1 0  .  .              0 1  .  .
    -2 -1 0  .              0 1  2  .
    -3 -2 -1 0              0 1  2  3

They hide no keys: with causal=True, kernels visit 136 of 256 blocks at 1024 keys.
"""

import torch
from torch import Tensor


def alibi_bias(slopes: Tensor, distance: int, ahead: Tensor | None = None) -> Tensor:
    """The `relative_bias` of ALiBi with learned slopes, or other slopes for keys after the query.

    Args:
        slopes: [H_q], decrease of the score per position before the query.
        distance: the largest distance, at least T_k - 1; beyond it the bias is constant.
        ahead: [H_q], decrease per position after it; default: slopes.

    Returns:
        [H_q, 2 * distance + 1], differentiable.
    """
    steps = torch.arange(-distance, distance + 1, device=slopes.device, dtype=slopes.dtype)
    behind = -slopes[:, None] * steps.clamp(min=0)
    return behind + (slopes if ahead is None else ahead)[:, None] * steps.clamp(max=0)


def forgetting_bias(log_gates: Tensor) -> Tensor:
    """The `attn_bias` of the forgetting transformer (FoX); call `attention` with causal=True.

    The weight of key j in row i is multiplied by the forget gates of j + 1 to i. In logs, the sum
    up to i is the same for all keys of a row, so the softmax cancels it: a bias per key remains.

    Args:
        log_gates: [B, H_q, T], log of the gates, as from `logsigmoid`.

    Returns:
        [B, H_q, 1, T], differentiable.
    """
    return -log_gates.cumsum(-1)[:, :, None]
