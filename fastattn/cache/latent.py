"""Latent caches: one buffer of keys, whose first columns are the values.

Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434) caches a latent of C columns per
token, from which all keys and values are projected, and R columns of rotary key. With the
up-projections absorbed into queries and outputs, it is attention over one K/V head with D = C + R
and D_v = C, which reads the latents once. With rope_dim = 0 the keys are the values.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .. import checks
from ..cache_view import CacheView, Stored, allocate_rows
from ..quantization import storage_dtype
from .checks import check_sizes
from .dense import KVCache
from .paged import PagedKVCache
from .views import view_of_tensors


def _widths(latent_dim: Any, rope_dim: Any) -> tuple[int, int]:
    """Columns of a key, and of a value."""
    (latent_dim,) = check_sizes(latent_dim=latent_dim)
    return latent_dim + checks.check_count("rope_dim", rope_dim, 0), latent_dim


LatentQuantize = Literal["int8", "fp8", "fp8_ds_mla"]
# Columns of a latent that share a scale in a record.
_OF_SCALE = 128


def _one_buffer(
    shape: tuple[int, ...], head_dim: int, value_dim: int, dtype: torch.dtype,
    quantize: LatentQuantize | None, device: torch.device | str | None,
) -> Stored:  # fmt: skip
    if quantize == "fp8_ds_mla":
        return _records(shape, head_dim - value_dim, value_dim, dtype, device)
    if quantize not in (None, "int8", "fp8"):
        raise ValueError(f"quantize must be None, 'int8', 'fp8' or 'fp8_ds_mla', got {quantize!r}")
    stored = dtype if quantize is None else storage_dtype(quantize)
    k = allocate_rows(*shape, width=head_dim, dtype=stored, device=device)
    if quantize is None:
        return Stored(k, k[..., :value_dim])
    scale = k.new_empty(*shape, dtype=torch.float32)
    return Stored(k, k[..., :value_dim], scale, scale)


def _records(
    shape: tuple[int, ...], rope_dim: int, latent_dim: int, dtype: torch.dtype,
    device: torch.device | str | None,
) -> Stored:  # fmt: skip
    if dtype != torch.bfloat16 or latent_dim % _OF_SCALE or rope_dim < 1 or shape[-2] != 1:
        raise ValueError(
            f"quantize='fp8_ds_mla' needs one head of bfloat16, latent_dim a multiple of "
            f"{_OF_SCALE}, and a rope_dim, got {shape[-2]} of {dtype}, {latent_dim} and {rope_dim}"
        )
    width = _codes_and_scales(latent_dim) + 2 * rope_dim
    return stored_in_records(
        allocate_rows(*shape, width=width, dtype=torch.uint8, device=device), latent_dim
    )


def _codes_and_scales(latent_dim: int) -> int:
    """Bytes of a record before its rotary columns."""
    return latent_dim + 4 * (latent_dim // _OF_SCALE)


def stored_in_records(records: Tensor, latent_dim: int) -> Stored:
    """Parts of records uint8 [..., bytes], the 8-bit latents of FlashMLA and vLLM ("fp8_ds_mla").

    656 bytes: 512 codes (e4m3), 4 scales (fp32) of 128 codes each, 64 rotary columns (bf16).
    """
    rope = _codes_and_scales(latent_dim)
    codes = records[..., :latent_dim].view(torch.float8_e4m3fn)
    scale = records[..., latent_dim:rope].view(torch.float32)
    return Stored(codes, codes, scale, scale, records[..., rope:].view(torch.bfloat16))


def view_of_records(
    records: Tensor, latent_dim: int, lengths: Tensor, block_table: Tensor | None = None
) -> CacheView:
    """A `CacheView` of external records [P, 1, S, bytes], as in `stored_in_records`.

    Args:
        records: uint8, int8 or float8_e4m3fn, any strides but the last.
        lengths, block_table: as of `view_of_tensors`.

    Raises:
        TypeError, ValueError: a tensor of the wrong dtype, shape, device or layout.
    """
    if checks.check_tensor("records", records).element_size() != 1:
        raise TypeError(f"records must be of bytes, got {records.dtype}")
    rope = records.shape[-1] - _codes_and_scales(latent_dim)
    if (
        records.dim() != 4
        or records.shape[1] != 1
        or latent_dim % _OF_SCALE
        or rope < 2
        or rope % 2
    ):
        raise ValueError(
            f"records must have shape [P, 1, S, bytes]: {latent_dim} codes, a multiple of "
            f"{_OF_SCALE}, their scales and rotary columns, got {list(records.shape)}"
        )
    parts = stored_in_records(records.view(torch.uint8), latent_dim)
    assert parts.rope is not None
    view = view_of_tensors(parts.rope, parts.rope, lengths, block_table=block_table)
    return view._replace(**parts._asdict())


class _Latents:
    """Buffers of the caches of latents."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    _rope: Tensor | None
    _buffers = staticmethod(_one_buffer)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # `pickle` copies each view of one memory.
        self.v = self.k[..., : self.v.shape[-1]]

    @property
    def stored_tensors(self) -> list[Tensor]:
        """Tensors of slots or pages, each memory once."""
        return [x for x in (self.k, self.k_scale, self._rope) if x is not None]


class LatentCache(_Latents, KVCache):
    """A `KVCache` of one K/V head whose values are the first columns of its keys.

    `decode_attention` takes it with q [B, H_q, T_q, latent_dim + rope_dim] and an explicit `scale`,
    from the head dim before absorption.

    Args:
        batch_size, max_length, device, dtype: as of `KVCache`.
        latent_dim: C, value columns of a key.
        rope_dim: R, further columns of a key; 0: the keys are the values.
        num_kv_heads: 1 for a latent shared by all heads.
        quantize: store "int8" or "fp8" (e4m3) codes with one fp32 scale a token; or, as
            "fp8_ds_mla", records of e4m3 codes in groups of 128 columns with a scale each, beside
            the rotary columns in bf16: 656 bytes for 512 + 64 columns. None: store `dtype` itself.

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

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        latent_dim: int,
        rope_dim: int = 0,
        *,
        num_kv_heads: int = 1,
        quantize: LatentQuantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim, value_dim = _widths(latent_dim, rope_dim)
        stored_as: Any = quantize
        super().__init__(
            batch_size, num_kv_heads, max_length, head_dim,
            value_dim=value_dim, quantize=stored_as, device=device, dtype=dtype,
        )  # fmt: skip

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
        v = _values(kv, self.head_dim, self.v.shape[-1])
        super().append(kv, v, new_lengths, batch_index=batch_index, backend=backend)


class PagedLatentCache(_Latents, PagedKVCache):
    """A `PagedKVCache` whose values are the first columns of its keys: see `LatentCache`.

    Args:
        num_pages, page_size, num_layers, max_rows, max_pages_per_row, device, dtype: as of
            `PagedKVCache`; pages hold 1 to 256 tokens.
        latent_dim, rope_dim, num_kv_heads, quantize: as of `LatentCache`.
    """

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
        quantize: LatentQuantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        head_dim, value_dim = _widths(latent_dim, rope_dim)
        stored_as: Any = quantize
        super().__init__(
            num_pages, page_size, num_kv_heads, head_dim, value_dim=value_dim,
            num_layers=num_layers, max_rows=max_rows, max_pages_per_row=max_pages_per_row,
            quantize=stored_as, device=device, dtype=dtype,
        )  # fmt: skip

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
        v = _values(kv, self.head_dim, self.v.shape[-1])
        super().append(rows, kv, v, new_lengths, layer=layer, backend=backend)


def _values(kv: Any, head_dim: int, width: int) -> Tensor:
    """The value columns of kv."""
    values: Tensor = checks.check_input(
        "kv", kv, "", "B H_k T latent+rope", kv, {"latent+rope": head_dim}
    )
    return values[..., :width]
