"""Backward for Hopper, deterministic: one kernel for dQ and delta, one for dK and dV.

    dv = p^T do          dp = do v^T          delta = rowsum(o * do) - dlse
    ds = p * (dp - delta)          dq = scale * ds k          dk = scale * ds^T q

Two kernels compute the scores twice, seven products in place of five; but no sum depends on the
order in which programs run, dQ needs no fp32 buffer, and no pass before or after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import empty_in_layout, kernel_mask, kernel_score, strides, tiles_of
from .backward_dkv import hopper_backward_dkv_kernel
from .backward_dq import hopper_backward_dq_kernel
from .config import backward_config
from .host import describe, end_early, heads_in_l2, multiprocessors, rows_of, tile_order
from .pipeline import ROWS

if TYPE_CHECKING:
    from fastattn.options import Options


def launch_hopper_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v; delta fp32 [B, H_q, T_q].

    delta is filled where the gradient of sinks needs it, and undefined elsewhere.

    do [B, H_q, T_q, D] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    o and lse as a forward, this one or the portable one, returned them for the same q, k, v and
    options. `why_not_hopper(..., backward=True)` is None.
    """
    B, H_q, T_q, D = q.shape
    _, H_k, T_k, _ = k.shape
    G = H_q // H_k
    dq = empty_in_layout(q, H_q, T_q, D)
    dk = empty_in_layout(k, H_k, T_k, D)
    dv = empty_in_layout(v, H_k, T_k, D)
    delta = torch.empty_like(lse)
    if B * H_q * T_q == 0:
        return dq, dk.zero_(), dv.zero_(), delta
    programs = multiprocessors(q.device)
    mask, score = kernel_mask(options), kernel_score(options, q.dtype)
    rows = 2 * ROWS.value
    tiles = tiles_of(options.cu_seqlens_q, 1, T_q, rows)
    stats = lse.new_empty(2, B * H_q, tiles * rows)
    config = backward_config("dq", D, end_early(options), options.softcap is not None)
    order = tile_order(B * H_q, tiles, heads_in_l2(k, v) * G)
    hopper_backward_dq_kernel[(min(order[0], programs),)](
        describe(q, ROWS.value), describe(k, config.BLOCK), describe(v, config.BLOCK),
        describe(do, ROWS.value), describe(dq, ROWS.value), rows_of(dq, options),
        (o, strides(o)), lse, dlse, delta if options.sinks is not None else None, *stats,
        stats.stride(1), mask, score, T_q, T_k, H_q, G, *order,
        D, config.BLOCK, config.STAGES, config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    packed = options.cu_seqlens_q is not None
    config = backward_config("dkv", D, packed, options.softcap is not None)
    tiles = tiles_of(options.cu_seqlens_k, 1, T_k, rows)
    order = tile_order(B * H_k, tiles, max(1, heads_in_l2(q, do) // G))
    hopper_backward_dkv_kernel[(min(order[0], programs),)](
        describe(q, config.BLOCK), describe(k, ROWS.value), describe(v, ROWS.value),
        describe(do, config.BLOCK), describe(dk, ROWS.value), describe(dv, ROWS.value),
        rows_of(dk, options), rows_of(dv, options), *stats, stats.stride(1), mask, score,
        T_q, T_k, H_k, G, *order,
        D, config.BLOCK, config.STAGES, config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, delta
