"""Key/value cache of 8-bit codes."""

import torch

from ..quantization import Quantize
from .dense import KVCache


class QuantizedKVCache(KVCache):
    """A `KVCache` whose keys and values are stored in 8 bits; `quantize` defaults to "int8"."""

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        keep_first: int = 0,
        quantize: Quantize = "int8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            batch_size,
            num_kv_heads,
            max_length,
            head_dim,
            value_dim=value_dim,
            window=window,
            keep_first=keep_first,
            quantize=quantize,
            device=device,
            dtype=dtype,
        )
