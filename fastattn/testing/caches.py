"""Caches of every kind driven through one interface, for tests and benchmarks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache
from ..paged_cache import PagedKVCache
from ..rotary import RotaryStyle


def tokens_of(
    B: int,
    H_q: int,
    H_k: int,
    T: int,
    D: int,
    D_v: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    transposed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, H_q, T, D], k [B, H_k, T, D] and v [B, H_k, T, D_v].

    transposed: views of one fused projection [B, T, heads, D], as a layer makes them.
    """
    shared_width = D_v == D
    if not (transposed and shared_width):
        shapes = ((H_q, D), (H_k, D), (H_k, D_v))
        q, k, v = (torch.randn(B, H, T, width, device=device).to(dtype) for H, width in shapes)
        return q, k, v
    fused = torch.randn(B, T, H_q + 2 * H_k, D, device=device).to(dtype).transpose(1, 2)
    q, k, v = fused.split((H_q, H_k, H_k), dim=1)
    return q, k, v


def append_randomly(
    cache: KVCache | PagedKVCache,
    steps: Sequence[tuple[int, list[int] | None]],
    *,
    rotary: tuple[Tensor, Tensor] | None,
    style: RotaryStyle = "half",
    transposed: bool = True,
    backend: str,
) -> list[Tensor]:
    """Append steps of (T, new_lengths) to the first rows of a cache, the same tokens every time.

    Returns:
        Everything that can be seen after it: rotated queries where they stand at tokens, keys,
        values and their positions of every layer, and lengths.
    """
    torch.manual_seed(1)
    H_k, D, D_v = cache.k.shape[-3], cache.k.shape[-1], cache.v.shape[-1]
    is_paged = isinstance(cache, PagedKVCache)
    rows = cache.rows[::-1] if is_paged else list(range(cache.lengths.shape[0]))
    layers = cache.num_layers if is_paged else 1
    device = cache.k.device
    seen = []
    for T, counts in steps:
        for layer in range(layers):
            q, k, v = tokens_of(
                len(rows), 2 * H_k, H_k, T, D, D_v,
                device=device, dtype=cache.dtype, transposed=transposed,
            )  # fmt: skip
            options = {"rotary": rotary, "rotary_style": style, "backend": backend}
            if isinstance(cache, PagedKVCache):
                turned = cache.append(rows, k, v, counts, layer=layer, q=q, **options)
            else:
                new = None if counts is None else torch.tensor(counts, device=device)
                turned = cache.append(k, v, new, q=q, **options)
            seen += [turned[b, :, :n] for b, n in enumerate(counts or [T] * len(rows))]
    for layer in range(layers):
        seen += cache.view(rows, layer).gather() if is_paged else cache.view().gather()
    return [*seen, cache.lengths]
