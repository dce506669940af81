"""Tables made from positions before a call: ALiBi slopes, T5 buckets, ids of packed documents."""

import math

import torch
from torch import Tensor

from . import checks


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """fp32 [num_heads]: the slopes of Press et al., "Train short, test long" (2022).

    For n heads, a power of two, the slopes are 2^(-8 / n), its square, its cube and so on. Between
    two powers, the heads beyond the lower one take every other slope of the higher, as the authors'
    code does.
    """
    num_heads = checks.check_count("num_heads", num_heads, 1)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    slopes += [2.0 ** (-4.0 * (h + 1) / lower) for h in range(0, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def t5_relative_bias(
    table: Tensor, max_offset: int, bidirectional: bool = True, max_distance: int = 128
) -> Tensor:
    """Convert T5's table of buckets to `relative_bias`, [H, 2 max_offset + 1].

    Half of the buckets hold one distance each; the other half divide distances up to max_distance
    logarithmically, as in the code of Raffel et al., "Exploring the limits of transfer learning",
    2020. Differentiable in the table.

    Args:
        table: [buckets, H].
        max_offset: R, the largest distinct distance. For the exact bias, at least max_distance or
            the longest distance in use.
        bidirectional: half of the buckets are for keys after the query. Else these keys share
            bucket 0 with the query's own position.
        max_distance: this and larger distances share the last bucket.
    """
    checks.check_input("table", table, "float", "buckets H", table, {}, dense=False)
    max_offset = checks.check_count("max_offset", max_offset, 0)
    if table.shape[0] < 4 or (bidirectional and table.shape[0] % 2):
        raise ValueError(
            f"table must have at least 4 buckets{', an even number' * bidirectional}, "
            f"got {list(table.shape)}"
        )
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    max_distance = checks.check_count("max_distance", max_distance, exact + 1)
    back = torch.arange(-max_offset, max_offset + 1, device=table.device)
    distance = back.abs() if bidirectional else back.clamp(min=0)
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = torch.where(distance < exact, distance, far)
    if bidirectional:
        bucket = bucket + buckets * (back < 0)
    return table[bucket].T


def document_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """int32 [1, length]: the `documents` ids of packed documents.

    Document n holds positions cu_seqlens[n] to cu_seqlens[n + 1] - 1. Positions past the last
    document get id -1, padding.

    Args:
        cu_seqlens: int32 or int64 [N + 1], non-decreasing from 0 to at most length. Values are read
            on a CPU only.
        length: the number of positions.

    Raises:
        TypeError, ValueError: offsets have another dtype, shape or order, or exceed length.
    """
    length = checks.check_count("length", length, 0)
    checks.check_offsets("cu_seqlens", cu_seqlens, length, cu_seqlens, least=1)
    position = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ids = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
    inside = position < cu_seqlens[-1]
    return torch.where(inside, ids, -1).to(torch.int32)[None]
