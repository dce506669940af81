"""Dilated windows, and windows whose width depends on the head.

    dilated(3, 2)           window_by_head, widths [1, 3]
    1 0 0 0 0 0             head 0      head 1
    0 1 0 0 0 0             1 0 0 0     1 0 0 0
    1 0 1 0 0 0             0 1 0 0     1 1 0 0
    0 1 0 1 0 0             0 0 1 0     1 1 1 0
    1 0 1 0 1 0             0 0 0 1     0 1 1 1
    0 1 0 1 0 1

At 1024 keys and blocks of 64, dilated(8, 8) visits 31 of 256 blocks.
"""

from typing import Any

import triton
import triton.language as tl

from .compose import bind


@triton.jit
def causal(b, h, q_pos, k_pos):
    """`mask_mod` of a causal mask, to join with others; by itself, `causal=True` is faster."""
    return k_pos <= q_pos


@triton.jit
def dilated_rule(b, h, q_pos, k_pos, count, step):
    distance = q_pos - k_pos
    return (distance >= 0) & (distance < count * step) & (distance % step == 0)


def dilated(count: int, step: int) -> Any:
    """A `mask_mod`: each query sees count keys, its own and every step-th before it (LongNet)."""
    return bind(dilated_rule, count, step)


@triton.jit
def window_by_head(b, h, q_pos, k_pos, widths):
    """`mask_mod`, causal: head h sees widths[h] keys, its own included; mod_tensors (widths,)."""
    return (k_pos <= q_pos) & (q_pos - k_pos < tl.load(widths + h))
