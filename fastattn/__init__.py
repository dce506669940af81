"""Exact fused attention in Triton, as functions and as drop-in torch modules."""

from .cache import KVCache as KVCache
from .cache import QuantizedKVCache as QuantizedKVCache
from .cache_view import CacheView as CacheView
from .dispatch import Explanation as Explanation
from .functional import attention as attention
from .functional import explain as explain
from .modules import CausalGQAttention as CausalGQAttention
from .page_table import OutOfPages as OutOfPages
from .paged_cache import PagedKVCache as PagedKVCache

__all__ = [
    "CacheView",
    "CausalGQAttention",
    "Explanation",
    "KVCache",
    "OutOfPages",
    "PagedKVCache",
    "QuantizedKVCache",
    "attention",
    "explain",
]
