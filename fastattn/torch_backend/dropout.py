"""Dropout masks in plain torch, bitwise equal to the kernels'.

The generator is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
a function of a key (the seed) and a counter (a weight's position) to four random words, so that
forward and backward draw the same bits in any order.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..options import Options

# The fewest rounds that pass all of the paper's tests.
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_seed(device: torch.device) -> Tensor:
    """Draw int64 [2] from torch's generator of `device`."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def seeded(options: Options, device: torch.device) -> Options:
    """The options with a seed, drawn unless given, if weights are dropped."""
    if not options.dropout or options.dropout_seed is not None:
        return options
    return options._replace(dropout_seed=draw_seed(device))


def keep_mask(
    seed: Tensor,
    dropout: float,
    B: int,
    H_q: int,
    T_q: int,
    T_k: int,
    *,
    first_row: int = 0,
    first_query: int = 0,
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
        first_row, first_query: b of the first batch row and i of the first query; not 0 for a part.
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
    fours, i = count(tracing.ceil_div(T_k, 4), 0)[None, None, None], count(T_q, 1)[None, None]
    i = i + first_query
    if positions is not None:
        i, j = positions[0].long()[:, None, :, None], positions[1].long()[:, None, None, :]
        fours = j // 4
    shape = B, H_q, T_q, fours.shape[-1]
    numbers = seed.tolist() if tracing.host_knows(seed) else seed
    kept = _kept(shape, numbers, (fours, i, head), int(dropout * 2**32))
    if positions is None:
        return kept.flatten(-2)[..., :T_k]
    return kept.take_along_dim((j % 4)[..., None], -1)[..., 0]


# Counters at once: their words, of 8 bytes, stay in a core's cache.
_AT_ONCE = 2**16


def _kept(shape: Sequence[int], seed: Any, counter: Sequence[Tensor], least: int) -> Tensor:
    """Mask of the words that are at least `least`: bool [*shape, 4]; in parts if the seed is
    numbers.

    counter: its first three words, which broadcast to `shape`.
    """
    dim = None if isinstance(seed, Tensor) else next((n for n in range(3) if shape[n] > 1), None)
    if dim is None or math.prod(shape) <= _AT_ONCE:
        words = philox((seed[0] & _WORD, seed[0] >> 32 & _WORD), (*counter, seed[1]))
        return torch.stack([word >= least for word in words], -1)
    kept = torch.empty((*shape, 4), dtype=torch.bool, device=counter[0].device)
    halves = [x.tensor_split(2, dim) if x.shape[dim] > 1 else (x, x) for x in (kept, *counter)]
    for part, *of_part in zip(*halves, strict=True):
        part.copy_(_kept(part.shape[:-1], seed, of_part, least))
    return kept


def philox(key: tuple[Any, Any], counter: tuple[Any, ...], rounds: int = _ROUNDS) -> Words:
    """Four 32-bit words, as int64, for a key of two and a counter of four words; all broadcast.

    The key and the counter's last word may be numbers.
    """
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = key
    for _ in range(rounds):
        # int64 wraps: its halves are the high and the low word, of which c1 and c3 are the low.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32 ^ (c1 ^ k0)).bitwise_and_(_WORD)
        c2 = (product0 >> 32 ^ (c3 ^ k1)).bitwise_and_(_WORD)
        c1, c3 = product1, product0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD
