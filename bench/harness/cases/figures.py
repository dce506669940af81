"""FLOPs and bytes of a case, and TFLOP/s and GB/s from its time.

Conventions of FlashAttention's benchmarks: a forward pass takes 4 * D operations per pair of query
and key in each head; a causal mask over T_q = T_k counts half of the pairs; a backward pass counts
2.5 forward passes (five products instead of two), without recomputation. Padding counts as work, to
compare with a dense batch; a window counts its exact pairs.
"""

from __future__ import annotations

import torch

from .case import Case

PASSES = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}


def _pairs(case: Case) -> float:
    """Pairs of query and key in one head of one batch row, by convention."""
    if case.window is None:
        half = case.causal and case.T_q > 1
        return case.T_q * (case.T_k + max(0, case.T_k - case.T_q) if half else 2 * case.T_k) / 2
    position = torch.arange(case.T_q) + (case.T_k - case.T_q)
    left, right = (case.T_k if side is None else side for side in case.window)
    high = (position + (0 if case.causal else right)).clamp(max=case.T_k - 1)
    return int((high - (position - left).clamp(min=0) + 1).clamp(min=0).sum())


def flops(case: Case) -> float:
    """Count floating-point operations, by convention."""
    return 4.0 * case.B * case.H_q * case.D * _pairs(case) * PASSES[case.direction]


def row_bytes(case: Case) -> int:
    """Bytes of a token in one head."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    return case.D * dtype.itemsize


def key_value_bytes(case: Case) -> int:
    """Bytes of all keys and values but padding, which decoding reads once; codes have scales."""
    keys = sum(case.lengths) if case.lengths is not None else case.B * case.T_k
    row = {"int8": case.D + 4, "fp8": case.D + 4}.get(case.option, row_bytes(case))
    return (1 if case.option == "latent" else 2) * keys * case.H_k * row


def input_bytes(case: Case) -> int:
    """Bytes of q, k, v and, with a backward, of o's gradient: held before the call."""
    queries, keys = case.B * case.H_q * case.T_q, case.B * case.H_k * case.T_k
    return (queries * (1 + (case.direction != "forward")) + 2 * keys) * row_bytes(case)


def least_memory(case: Case) -> int:
    """Count the bytes of inputs, outputs and lse, the least memory of a fused implementation.

    Forward: q, k, v, o and lse; backward adds the gradients of all four.
    """
    queries, keys = case.B * case.H_q * case.T_q, case.B * case.H_k * case.T_k
    tensors = 2 * (queries + keys) * row_bytes(case)
    return tensors * (1 + (case.direction != "forward")) + 4 * queries


def figures(case: Case, ms: float) -> dict[str, float]:
    """Compute tflops of a case that takes `ms` milliseconds, and of decoding also kv_gbps."""
    rates = {"tflops": flops(case) / ms / 1e9}
    if case.family == "decode":
        rates["kv_gbps"] = key_value_bytes(case) / ms / 1e6
    return rates
