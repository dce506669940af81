"""Exact fused attention in Triton, as functions and as drop-in torch modules."""

from .cache import KVCache as KVCache
from .cache import QuantizedKVCache as QuantizedKVCache
from .cache_view import CacheView as CacheView
from .dispatch import Explanation as Explanation
from .dropout import keep_mask as dropout_keep_mask
from .functional import attention as attention
from .functional import attention_varlen as attention_varlen
from .functional import explain as explain
from .functions import BlockMask as BlockMask
from .modules import CausalGQAttention as CausalGQAttention
from .page_table import OutOfPages as OutOfPages
from .paged_cache import PagedKVCache as PagedKVCache
from .positions import alibi_slopes as alibi_slopes
from .positions import document_ids as document_ids
from .positions import t5_relative_bias as t5_relative_bias

__all__ = [
    "BlockMask",
    "CacheView",
    "CausalGQAttention",
    "Explanation",
    "KVCache",
    "OutOfPages",
    "PagedKVCache",
    "QuantizedKVCache",
    "alibi_slopes",
    "attention",
    "attention_varlen",
    "document_ids",
    "dropout_keep_mask",
    "explain",
    "t5_relative_bias",
]
