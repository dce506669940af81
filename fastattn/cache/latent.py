"""Latent caches: one buffer of keys, whose first columns are the values.

Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434) caches a latent of C columns per
token, from which all keys and values are projected, and R columns of rotary key. With the
up-projections absorbed into queries and outputs, it is attention over one K/V head with D = C + R
and D_v = C, which reads the latents once. With rope_dim = 0 the keys are the values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..cache_view import allocate_rows
from .checks import check_sizes
from .dense import KVCache
from .paged import PagedKVCache


def _widths(latent_dim: Any, rope_dim: Any) -> tuple[int, int]:
    """Columns of a key, and of a value."""
    (latent_dim,) = check_sizes(latent_dim=latent_dim)
    return latent_dim + checks.check_count("rope_dim", rope_dim, 0), latent_dim


def _one_buffer(
    shape: tuple[int, ...], head_dim: int, value_dim: int, dtype: torch.dtype,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k = allocate_rows(*shape, width=head_dim, dtype=dtype, device=device)
    return k, k[..., :value_dim]


class LatentCache(KVCache):
    """A `KVCache` of one K/V head whose values are the first columns of its keys.

    `decode_attention` takes it with q [B, H_q, T_q, latent_dim + rope_dim] and an explicit `scale`,
    from the head dim before absorption.

    Args:
        batch_size, max_length, device, dtype: as of `KVCache`.
        latent_dim: C, value columns of a key.
        rope_dim: R, further columns of a key; 0: the keys are the values.
        num_kv_heads: 1 for a latent shared by all heads.

    Raises:
        TypeError: a size is no int, or dtype not floating.
        ValueError: a size is not positive, or rope_dim negative.

    Examples:
        >>> cache = LatentCache(batch_size=2, max_length=8, latent_dim=16, rope_dim=4)
        >>> cache.append(torch.randn(2, 1, 3, 20))
        >>> q = torch.randn(2, 4, 1, 20)
        >>> tuple(fastattn.decode_attention(q, cache, scale=12**-0.5).shape)
        (2, 4, 1, 16)
    """

    rotates = False
    _buffers = staticmethod(_one_buffer)

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        latent_dim: int,
        rope_dim: int = 0,
        *,
        num_kv_heads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim, value_dim = _widths(latent_dim, rope_dim)
        super().__init__(
            batch_size, num_kv_heads, max_length, head_dim,
            value_dim=value_dim, device=device, dtype=dtype,
        )  # fmt: skip

    @property
    def stored_tensors(self) -> list[Tensor]:
        return [self.k]

    def append(  # type: ignore[override]
        self,
        kv: Tensor,
        new_lengths: Tensor | None = None,
        *,
        batch_index: Tensor | None = None,
        backend: str | None = None,
    ) -> None:
        """Write T new tokens after every row's last one, in place; see `KVCache.append`.

        Args:
            kv: [B, H_k, T, latent_dim + rope_dim], the latents, then the rotated rotary keys; dtype
                and device of the cache, any strides.
            new_lengths, batch_index, backend: as of `KVCache.append`.

        Raises:
            TypeError, ValueError: as `KVCache.append`; kv has another width.
        """
        v = _values(kv, self.k, self.v.shape[-1])
        super().append(kv, v, new_lengths, batch_index=batch_index, backend=backend)


class PagedLatentCache(PagedKVCache):
    """A `PagedKVCache` whose values are the first columns of its keys: see `LatentCache`.

    Args:
        num_pages, page_size, num_layers, max_rows, max_pages_per_row, device, dtype: as of
            `PagedKVCache`; pages hold 1 to 256 tokens.
        latent_dim, rope_dim, num_kv_heads: as of `LatentCache`.
    """

    _buffers = staticmethod(_one_buffer)

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        latent_dim: int,
        rope_dim: int = 0,
        *,
        num_kv_heads: int = 1,
        num_layers: int = 1,
        max_rows: int = 64,
        max_pages_per_row: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim, value_dim = _widths(latent_dim, rope_dim)
        super().__init__(
            num_pages, page_size, num_kv_heads, head_dim, value_dim=value_dim,
            num_layers=num_layers, max_rows=max_rows, max_pages_per_row=max_pages_per_row,
            device=device, dtype=dtype,
        )  # fmt: skip

    @property
    def stored_tensors(self) -> list[Tensor]:
        return [self.k]

    def append(  # type: ignore[override]
        self,
        rows: Sequence[int],
        kv: Tensor,
        new_lengths: Sequence[int] | None = None,
        *,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        """Write T new tokens after the last one of each of these rows; see `PagedKVCache.append`.

        Args:
            kv: as of `LatentCache.append`.
        """
        v = _values(kv, self.k, self.v.shape[-1])
        super().append(rows, kv, v, new_lengths, layer=layer, backend=backend)


def _values(kv: Any, like: Tensor, width: int) -> Tensor:
    """The value columns of kv."""
    if checks.check_tensor("kv", kv).dim() != 4 or kv.shape[-1] != like.shape[-1]:
        raise ValueError(
            f"kv must have shape [B, H_k, T, {like.shape[-1]}], the latent and then the rotary "
            f"key, got {list(kv.shape)}"
        )
    return kv[..., :width]
