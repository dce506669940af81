"""Key/value caches: storage and appending."""

from .dense import KVCache as KVCache
from .dense import QuantizedKVCache as QuantizedKVCache
from .paged import PagedKVCache as PagedKVCache
