"""Key/value caches: storage and appending."""

from .dense import KVCache as KVCache
from .paged import PagedKVCache as PagedKVCache
from .quantized import QuantizedKVCache as QuantizedKVCache
