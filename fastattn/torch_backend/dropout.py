"""Dropout masks in plain torch, bitwise equal to the kernels'.

The generator is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
a function of a key (the seed) and a counter (a weight's position) to four random words, so that
forward and backward draw the same bits in any order.
"""

import torch
from torch import Tensor

from .. import checks

# The fewest rounds that pass all of the paper's tests.
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(device: torch.device) -> Tensor:
    """Draw int64 [2] from torch's generator of `device`."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor,
    dropout: float,
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    *,
    first_row: int = 0,
    positions: tuple[Tensor, Tensor] | None = None,
    heads: tuple[int, int] | None = None,
) -> Tensor:
    """Weights that `attention` keeps: bool [B, H_q, T_q, T_k], on the seed's device.

    For query i, key j, head h and batch row b, the Philox key is seed[0], low word first, and the
    counter is (j // 4, i, b H_q + h, seed[1]), each in 32 bits. Key j takes word j % 4 of the
    four, and is kept where that is at least floor(dropout * 2^32).

    Args:
        seed: int64 [2], the dropout_seed of the call.
        dropout: probability in [0, 1) to drop a weight.
        B, H_q, T_q, T_k: sizes of the call.
        first_row: b of the first batch row; not 0 for a part of a batch.
        positions: of the call, which replace i and j: int32 [B or 1, T_q] and [B or 1, T_k]; keys'
            at least 0.
        heads: of the call, (first, total): first + h and total replace h and H_q.

    Raises:
        TypeError, ValueError: a seed of another dtype or shape, or dropout out of range.
    """
    checks.check_input("seed", seed, "int64", "2", seed, {})
    dropout = checks.check_fraction("dropout", dropout)
    device = seed.device

    def count(n: int, dims: int) -> Tensor:
        return torch.arange(n, device=device).reshape(-1, *[1] * dims)

    first_head, all_heads = (0, H_q) if heads is None else heads
    head = (count(B, 3) + first_row) * all_heads + count(H_q, 2) + first_head
    key = (seed[0] & _WORD, seed[0] >> 32 & _WORD)
    if positions is None:
        words = philox(key, (count(-(-T_k // 4), 0), count(T_q, 1), head, seed[1]))
        drawn = torch.stack(words, -1).flatten(-2)[..., :T_k]
    else:
        i, j = positions[0].long()[:, None, :, None], positions[1].long()[:, None, None, :]
        words = philox(key, (j // 4, i, head, seed[1]))
        drawn = torch.stack(words, -1).take_along_dim((j % 4)[..., None], -1)[..., 0]
    return drawn >= int(dropout * 2**32)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...], rounds: int = _ROUNDS) -> Words:
    """Four 32-bit words, as int64, for a key of two and a counter of four words; all broadcast."""
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of x * factor, by halves of x to avoid overflow of int64."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & _WORD
