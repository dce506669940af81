"""Public names for type checkers: written by tests/test_options.py."""

# ruff: noqa: I001
# fmt: off
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .functional.merge import SharedPages
from .functional.paged import TreeMask
from .arguments import AttentionArguments, AttentionVarlenArguments, DecodeAttentionArguments, AttentionPagedArguments, AttentionFp8Arguments, AttentionVarlenFp8Arguments, AdditiveAttentionArguments, SelectedAttentionArguments  # noqa: E501
from .block_mask import BlockMask as BlockMask
from .cache.dense import KVCache as KVCache
from .cache.latent import LatentCache as LatentCache
from .cache.latent import PagedLatentCache as PagedLatentCache
from .cache.page_allocator import OutOfPages as OutOfPages
from .cache.paged import PagedKVCache as PagedKVCache
from .cache.quantized import QuantizedKVCache as QuantizedKVCache
from .cache.slots import append_paged as append_paged
from .cache.views import view_of_tensors as view_of_tensors
from .cache_view import CacheView as CacheView
from .compat.multihead import MultiheadAttention as MultiheadAttention
from .compat.patch import patch_sdpa as patch_sdpa
from .compat.patch import unpatch_sdpa as unpatch_sdpa
from .compat.swap.model import swap as swap
from .dispatch import Explanation as Explanation
from .functional.block import BlockGradients as BlockGradients
from .functional.block import attention_block_backward as attention_block_backward
from .functional.block import attention_block_forward as attention_block_forward
from .functional.fp8 import PackedValues as PackedValues
from .functional.fp8 import pack_values as pack_values
from .functional.fp8 import quantize_fp8 as quantize_fp8
from .functional.merge import cascade_attention as cascade_attention
from .functional.merge import merge as merge
from .functional.merge import shared_pages as shared_pages
from .functional.scoring import dot_product_attention as dot_product_attention
from .functional.scoring import multiplicative_attention as multiplicative_attention
from .functional.selected import block_indices as block_indices
from .functional.selected import decode_selected as decode_selected
from .functional.selected import indexer_loss as indexer_loss
from .functional.selected import moba_attention as moba_attention
from .functional.selected import native_sparse_attention as native_sparse_attention
from .functional.selected import select_blocks as select_blocks
from .functional.selected import select_tokens as select_tokens
from .functional.statistics import AttentionStatistics as AttentionStatistics
from .functional.statistics import attention_statistics as attention_statistics
from .functional.statistics import attention_weights as attention_weights
from .functional.warmup import warmup as warmup
from .modules.cross_attention import CrossGQAttention as CrossGQAttention
from .modules.latent_attention import MultiheadLatentAttention as MultiheadLatentAttention
from .modules.self_attention import CausalGQAttention as CausalGQAttention
from .modules.self_attention import GQAttention as GQAttention
from .modules.sparse import MoBAttention as MoBAttention
from .modules.sparse import NativeSparseAttention as NativeSparseAttention
from .position_tables import alibi_slopes as alibi_slopes
from .position_tables import document_ids as document_ids
from .position_tables import t5_relative_bias as t5_relative_bias
from .torch_backend.dropout import keep_mask as dropout_keep_mask

__version__: str
tune: Callable[..., Any]
verify: Callable[..., Any]
__all__ = ['AttentionStatistics', 'BlockGradients', 'BlockMask', 'CacheView', 'CausalGQAttention',
    'CrossGQAttention', 'Explanation', 'GQAttention', 'KVCache', 'LatentCache', 'MoBAttention',
    'MultiheadAttention', 'MultiheadLatentAttention', 'NativeSparseAttention', 'OutOfPages',
    'PackedValues', 'PagedKVCache', 'PagedLatentCache', 'QuantizedKVCache', 'additive_attention',
    'alibi_slopes', 'append_paged', 'attention', 'attention_block_backward',
    'attention_block_forward', 'attention_fp8', 'attention_paged', 'attention_statistics',
    'attention_varlen', 'attention_varlen_fp8', 'attention_weights', 'block_indices',
    'cascade_attention', 'decode_attention', 'decode_selected', 'document_ids',
    'dot_product_attention', 'dropout_keep_mask', 'explain', 'explain_decode', 'explain_fp8',
    'explain_paged', 'explain_selected', 'indexer_loss', 'merge', 'moba_attention',
    'multiplicative_attention', 'native_sparse_attention', 'pack_values', 'patch_sdpa',
    'quantize_fp8', 'select_blocks', 'select_tokens', 'selected_attention', 'shared_pages', 'swap',
    't5_relative_bias', 'tune', 'unpatch_sdpa', 'verify', 'view_of_tensors', 'warmup']

@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = ..., w_key: Tensor |
    None = ..., *, backend: str | None = ..., return_lse: Literal[False] = ..., **options:
    Unpack[AdditiveAttentionArguments]
) -> Tensor: ...
@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = ..., w_key: Tensor |
    None = ..., *, backend: str | None = ..., return_lse: Literal[True], **options:
    Unpack[AdditiveAttentionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = ..., w_key: Tensor |
    None = ..., *, backend: str | None = ..., return_lse: bool, **options:
    Unpack[AdditiveAttentionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = ..., return_lse: Literal[False]
    = ..., return_max: Literal[False] = ..., **options: Unpack[AttentionArguments]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = ..., return_lse: Literal[True],
    return_max: Literal[False] = ..., **options: Unpack[AttentionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = ..., return_lse: bool,
    return_max: Literal[False] = ..., **options: Unpack[AttentionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = ..., return_lse: bool = ...,
    return_max: Literal[True], **options: Unpack[AttentionArguments]
) -> tuple[Tensor, ...]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = ..., return_lse: bool = ...,
    return_max: bool, **options: Unpack[AttentionArguments]
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ..., k_scale:
    Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ..., backend:
    str | None = ..., return_lse: Literal[False] = ..., **options:
    Unpack[AttentionFp8Arguments]
) -> Tensor: ...
@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ..., k_scale:
    Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ..., backend:
    str | None = ..., return_lse: Literal[True], **options: Unpack[AttentionFp8Arguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ..., k_scale:
    Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ..., backend:
    str | None = ..., return_lse: bool, **options: Unpack[AttentionFp8Arguments]
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_paged(
    q: Tensor, cache: Any, cu_seqlens_q: Tensor, *, max_seqlen_q: int | None = ..., tree_mask:
    TreeMask = ..., shared: SharedPages | None = ..., out: Tensor | None = ..., backend: str |
    None = ..., return_lse: Literal[False] = ..., **options: Unpack[AttentionPagedArguments]
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor, cache: Any, cu_seqlens_q: Tensor, *, max_seqlen_q: int | None = ..., tree_mask:
    TreeMask = ..., shared: SharedPages | None = ..., out: Tensor | None = ..., backend: str |
    None = ..., return_lse: Literal[True], **options: Unpack[AttentionPagedArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_paged(
    q: Tensor, cache: Any, cu_seqlens_q: Tensor, *, max_seqlen_q: int | None = ..., tree_mask:
    TreeMask = ..., shared: SharedPages | None = ..., out: Tensor | None = ..., backend: str |
    None = ..., return_lse: bool, **options: Unpack[AttentionPagedArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    *, backend: str | None = ..., return_lse: Literal[False] = ..., return_max: Literal[False]
    = ..., **options: Unpack[AttentionVarlenArguments]
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    *, backend: str | None = ..., return_lse: Literal[True], return_max: Literal[False] = ...,
    **options: Unpack[AttentionVarlenArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    *, backend: str | None = ..., return_lse: bool, return_max: Literal[False] = ...,
    **options: Unpack[AttentionVarlenArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    *, backend: str | None = ..., return_lse: bool = ..., return_max: Literal[True],
    **options: Unpack[AttentionVarlenArguments]
) -> tuple[Tensor, ...]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    *, backend: str | None = ..., return_lse: bool = ..., return_max: bool, **options:
    Unpack[AttentionVarlenArguments]
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def attention_varlen_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    | None = ..., *, q_scale: Tensor | None = ..., k_scale: Tensor | None = ..., v_scale:
    Tensor | None = ..., out_dtype: torch.dtype = ..., backend: str | None = ..., return_lse:
    Literal[False] = ..., **options: Unpack[AttentionVarlenFp8Arguments]
) -> Tensor: ...
@overload
def attention_varlen_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    | None = ..., *, q_scale: Tensor | None = ..., k_scale: Tensor | None = ..., v_scale:
    Tensor | None = ..., out_dtype: torch.dtype = ..., backend: str | None = ..., return_lse:
    Literal[True], **options: Unpack[AttentionVarlenFp8Arguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    | None = ..., *, q_scale: Tensor | None = ..., k_scale: Tensor | None = ..., v_scale:
    Tensor | None = ..., out_dtype: torch.dtype = ..., backend: str | None = ..., return_lse:
    bool, **options: Unpack[AttentionVarlenFp8Arguments]
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    backend: str | None = ..., return_lse: Literal[False] = ..., **options:
    Unpack[DecodeAttentionArguments]
) -> Tensor: ...
@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    backend: str | None = ..., return_lse: Literal[True], **options:
    Unpack[DecodeAttentionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def decode_attention(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    backend: str | None = ..., return_lse: bool, **options: Unpack[DecodeAttentionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...

def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_max: bool = ...,
    backend: str | None = ..., **options: Unpack[AttentionArguments]
) -> Explanation: ...

def explain_decode(
    q: Tensor, cache: Any, *, new_lengths: Tensor | None = ..., num_splits: int | None = ...,
    return_lse: bool = ..., backend: str | None = ..., **options:
    Unpack[DecodeAttentionArguments]
) -> Explanation: ...

def explain_fp8(
    q: Tensor, k: Tensor, v: Tensor | PackedValues, *, q_scale: Tensor | None = ..., k_scale:
    Tensor | None = ..., v_scale: Tensor | None = ..., out_dtype: torch.dtype = ...,
    return_lse: bool = ..., backend: str | None = ..., **options:
    Unpack[AttentionFp8Arguments]
) -> Explanation: ...

def explain_paged(
    q: Tensor, cache: Any, cu_seqlens_q: Tensor, *, max_seqlen_q: int | None = ..., tree_mask:
    TreeMask = ..., shared: SharedPages | None = ..., out: Tensor | None = ..., return_lse:
    bool = ..., backend: str | None = ..., **options: Unpack[AttentionPagedArguments]
) -> Explanation: ...

def explain_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ..., counts:
    Tensor | None = ..., return_lse: bool = ..., backend: str | None = ..., **options:
    Unpack[SelectedAttentionArguments]
) -> Explanation: ...

@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ..., counts:
    Tensor | None = ..., backend: str | None = ..., return_lse: Literal[False] = ...,
    **options: Unpack[SelectedAttentionArguments]
) -> Tensor: ...
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ..., counts:
    Tensor | None = ..., backend: str | None = ..., return_lse: Literal[True], **options:
    Unpack[SelectedAttentionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ..., counts:
    Tensor | None = ..., backend: str | None = ..., return_lse: bool, **options:
    Unpack[SelectedAttentionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
