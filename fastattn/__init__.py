"""Exact fused attention in Triton, as functions and as drop-in torch modules."""

from .cache import KVCache as KVCache
from .cache import QuantizedKVCache as QuantizedKVCache
from .cache_view import CacheView as CacheView
from .compat.multihead import MultiheadAttention as MultiheadAttention
from .compat.patch import patch_sdpa as patch_sdpa
from .compat.patch import unpatch_sdpa as unpatch_sdpa
from .compat.swap import swap as swap
from .cross_attention import CrossGQAttention as CrossGQAttention
from .decode import decode_attention as decode_attention
from .decode import explain_decode as explain_decode
from .decode import view_of_tensors as view_of_tensors
from .dispatch import Explanation as Explanation
from .dropout import keep_mask as dropout_keep_mask
from .fp8 import PackedValues as PackedValues
from .fp8 import attention_fp8 as attention_fp8
from .fp8 import explain_fp8 as explain_fp8
from .fp8 import pack_values as pack_values
from .fp8 import quantize_fp8 as quantize_fp8
from .functional import attention as attention
from .functional import attention_varlen as attention_varlen
from .functional import explain as explain
from .functions import BlockMask as BlockMask
from .merging import cascade_attention as cascade_attention
from .merging import merge as merge
from .modules import CausalGQAttention as CausalGQAttention
from .modules import GQAttention as GQAttention
from .page_table import OutOfPages as OutOfPages
from .paged_cache import PagedKVCache as PagedKVCache
from .positions import alibi_slopes as alibi_slopes
from .positions import document_ids as document_ids
from .positions import t5_relative_bias as t5_relative_bias
from .scoring import additive_attention as additive_attention
from .scoring import dot_product_attention as dot_product_attention
from .scoring import multiplicative_attention as multiplicative_attention
from .statistics import AttentionStatistics as AttentionStatistics
from .statistics import attention_statistics as attention_statistics
from .statistics import attention_weights as attention_weights
from .warmup import warmup as warmup

__all__ = [
    "AttentionStatistics",
    "BlockMask",
    "CacheView",
    "CausalGQAttention",
    "CrossGQAttention",
    "Explanation",
    "GQAttention",
    "KVCache",
    "MultiheadAttention",
    "OutOfPages",
    "PackedValues",
    "PagedKVCache",
    "QuantizedKVCache",
    "additive_attention",
    "alibi_slopes",
    "attention",
    "attention_fp8",
    "attention_statistics",
    "attention_varlen",
    "attention_weights",
    "cascade_attention",
    "decode_attention",
    "document_ids",
    "dot_product_attention",
    "dropout_keep_mask",
    "explain",
    "explain_decode",
    "explain_fp8",
    "merge",
    "multiplicative_attention",
    "pack_values",
    "patch_sdpa",
    "quantize_fp8",
    "swap",
    "t5_relative_bias",
    "unpatch_sdpa",
    "view_of_tensors",
    "warmup",
]
