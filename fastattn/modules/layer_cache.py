"""How a layer reads a cache: by the decode kernels, or as dense keys and values."""

import torch
from torch import Tensor

from .checks import LayerCache

# Rows of queries of a K/V head, up to which reading the cache is what a call costs.
_FEW_ROWS = 64


def decodes(rows: int, cache: LayerCache) -> bool:
    """Whether `decode_attention` serves a call with so many rows of queries a K/V head.

    It has no gradients. Beyond a few rows `attention` is the faster one, where it can read the
    cache: where position t stands in slot t, as it is.
    """
    if torch.is_grad_enabled() or not hasattr(cache, "view"):
        return False
    return rows <= _FEW_ROWS or not getattr(cache, "is_plain", True)


def rotates(cache: LayerCache) -> bool:
    """Whether the cache's `append` rotates keys and queries itself, and may do so here.

    A compiled graph would make the tables of all positions anew in every step.
    """
    return getattr(cache, "rotates", False) and not torch.compiler.is_compiling()


def append_and_read(
    cache: LayerCache, k: Tensor, v: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values of a cache with these new ones, and key_lengths and query_offset for both."""
    # While all rows are equally long the newest query stands at the last key, as it does without a
    # cache, and no lengths are needed.
    ragged = cache.uniform_length is None or key_lengths is not None
    query_offset = cache.lengths.clone() if ragged else None
    cache.append(k, v, key_lengths)
    n = cache.length_bound
    return cache.k[:, :, :n], cache.v[:, :, :n], cache.lengths if ragged else None, query_offset
