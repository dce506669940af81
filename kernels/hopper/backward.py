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

from ..arguments import blocks, empty_in_layout, kernel_mask, kernel_score, strides
from .backward_dkv import hopper_backward_dkv_kernel
from .backward_dq import hopper_backward_dq_kernel
from .config import backward_config
from .host import describe, heads_in_l2, multiprocessors, tile_order
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
    if B * H_q * T_q == 0:
        return dq, dk.zero_(), dv.zero_(), torch.empty_like(lse)
    programs = multiprocessors(q.device)
    mask, score = kernel_mask(options), kernel_score(options, q.dtype)
    rows = 2 * ROWS.value
    stats = lse.new_empty(2, B * H_q, blocks(T_q, rows) * rows)
    needs = (options.key_lengths is not None, options.softcap is not None)
    config = backward_config("dq", D, *needs)
    order = tile_order(B * H_q, blocks(T_q, rows), heads_in_l2(k, v) * G)
    hopper_backward_dq_kernel[(min(order[0], programs),)](
        describe(q, ROWS.value), describe(k, config.BLOCK), describe(v, config.BLOCK),
        describe(do, ROWS.value), describe(dq, ROWS.value), o, strides(o), lse, dlse, *stats,
        stats.stride(1), mask, score, T_q, T_k, H_q, G, *order,
        D, config.BLOCK, config.STAGES, config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    config = backward_config("dkv", D, *needs)
    order = tile_order(B * H_k, blocks(T_k, rows), max(1, heads_in_l2(q, do) // G))
    hopper_backward_dkv_kernel[(min(order[0], programs),)](
        describe(q, config.BLOCK), describe(k, ROWS.value), describe(v, ROWS.value),
        describe(do, config.BLOCK), describe(dk, ROWS.value), describe(dv, ROWS.value),
        *stats, stats.stride(1), mask, score, T_q, T_k, H_k, G, *order,
        D, config.BLOCK, config.STAGES, config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    delta = torch.empty_like(lse)
    if options.sinks is not None:
        torch.neg(stats[1].view(B, H_q, -1)[:, :, :T_q], out=delta)
    return dq, dk, dv, delta
