"""Reading a cache: by the decode kernels, or as dense keys and values."""

import torch
from torch import Tensor

from .checks import LayerCache

# With at most so many query rows per K/V head, reading the cache dominates the cost.
_FEW_ROWS = 64


def decodes(rows: int, cache: LayerCache) -> bool:
    """Whether a call with so many query rows per K/V head uses `decode_attention`."""
    # It has no gradients. Beyond a few rows `attention` is faster, if it can read the cache.
    if torch.is_grad_enabled() or not hasattr(cache, "view"):
        return False
    return rows <= _FEW_ROWS or not getattr(cache, "is_plain", True)


def rotates(cache: LayerCache) -> bool:
    """Whether the cache's `append` rotates keys and queries in this call."""
    # A compiled graph would compute the tables of all positions in every step.
    return getattr(cache, "rotates", False) and not torch.compiler.is_compiling()


def append_and_read(
    cache: LayerCache, k: Tensor, v: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Append; return the cache's keys, values, key_lengths and query_offset."""
    # With rows of one length the last query is at the last key, as without a cache: no lengths are
    # needed.
    ragged = cache.uniform_length is None or key_lengths is not None
    query_offset = cache.lengths.clone() if ragged else None
    cache.append(k, v, key_lengths)
    n = cache.length_bound
    return cache.k[:, :, :n], cache.v[:, :, :n], cache.lengths if ragged else None, query_offset
