"""Users' functions of generated calls: masks and scores, alone and with tensors to read; Python's.

Tables have TABLE entries, which positions and heads wrap around, so that any position is legal.
"""

from typing import Any

import torch
import triton
import triton.language as tl

TABLE = tl.constexpr(16)


@triton.jit
def striped(b, h, q_pos, k_pos):
    return (k_pos // 3) % 2 == b % 2


@triton.jit
def ahead_or_near(b, h, q_pos, k_pos):
    return (k_pos <= q_pos) | (tl.abs(q_pos - k_pos) <= h % 4)


@triton.jit
def within_table(b, h, q_pos, k_pos, floats, integers):
    reach = tl.load(integers + h % TABLE)
    return (tl.abs(q_pos - k_pos) <= reach) | (tl.load(integers + k_pos % TABLE) % 3 == 0)


@triton.jit
def halved(x, b, h, q_pos, k_pos):
    return tl.where(k_pos % 2 == 0, 0.5 * x, x) + 0.1 * (h % 3)


@triton.jit
def halved_grad(dx, x, b, h, q_pos, k_pos):
    return tl.where(k_pos % 2 == 0, 0.5 * dx, dx)


@triton.jit
def bent(x, b, h, q_pos, k_pos):
    return x * tl.sigmoid(x)


@triton.jit
def bent_grad(dx, x, b, h, q_pos, k_pos):
    s = tl.sigmoid(x)
    return dx * (s + x * s * (1 - s))


@triton.jit
def hiding(x, b, h, q_pos, k_pos):
    """-inf in runs that fill whole blocks of keys, which no mask announces."""
    return tl.where((k_pos // 32 + q_pos + h) % 2 == 0, float("-inf"), 2 * x)


@triton.jit
def hiding_grad(dx, x, b, h, q_pos, k_pos):
    return 2 * dx


@triton.jit
def by_table(x, b, h, q_pos, k_pos, floats, integers):
    hidden = tl.load(integers + (k_pos // 32 + h) % TABLE) % 3 == 0
    y = x * tl.load(floats + h % TABLE) + tl.load(floats + k_pos % TABLE)
    return tl.where(hidden, float("-inf"), y)


@triton.jit
def by_table_grad(dx, x, b, h, q_pos, k_pos, floats, integers):
    return dx * tl.load(floats + h % TABLE)


REACH = torch.tensor([2, 9, 0, 4])
RAMP = torch.linspace(-1, 1, 12).view(3, 4)


def of_scope(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
    far = (q_pos - k_pos).abs() > REACH[h % 4 - 4]
    return ~far | ((q_pos - k_pos) // 5 % 3 == b % 2) | (k_pos % 7 == 0)


def ramped(x: Any, b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
    slope = RAMP[h % 3][(q_pos - k_pos) % 4]
    return torch.where(k_pos % 16 == 9, -torch.inf, torch.tanh(x * slope) + slope * 2 - x / 3)


def learning(function: Any) -> Any:
    """The function, with a table that learns, `weight`, in the place of the first mod_tensor."""

    def call(*args: Any, weight: Any, **options: Any) -> Any:
        options["mod_tensors"] = (weight, *options["mod_tensors"][1:])
        return function(*args, **options)

    return call


# (function, whether b matters, whether h does)
MASKS: list[tuple[Any, bool, bool]] = [
    (striped, True, False),
    (ahead_or_near, False, True),
    (of_scope, True, True),
]
MASKS_OF_TENSORS: list[tuple[Any, bool, bool]] = [(within_table, False, True)]
SCORES: list[tuple[Any, Any]] = [
    (halved, halved_grad),
    (bent, bent_grad),
    (hiding, hiding_grad),
    (ramped, None),
]
SCORES_OF_TENSORS: list[tuple[Any, Any]] = [(by_table, by_table_grad)]
