"""Key/value caches: storage and appending."""

from .dense import KVCache as KVCache
from .latent import LatentCache as LatentCache
from .latent import PagedLatentCache as PagedLatentCache
from .paged import PagedKVCache as PagedKVCache
from .quantized import QuantizedKVCache as QuantizedKVCache
