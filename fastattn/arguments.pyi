"""Options of each call, for type checkers: written from the table of options."""

from typing import Any, TypedDict

from torch import Tensor

class AttentionArguments(TypedDict, total=False):
    """Options of `attention`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    stride: int | None
    mod_tensors: tuple[Tensor, ...]
    mask_mod: Any
    heads: tuple[int, int] | None
    prefix_lengths: int | Tensor | None
    key_lengths: Tensor | None
    query_offset: int | Tensor | None
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    documents: Tensor | tuple[Tensor, Tensor] | None
    positions: tuple[Tensor, Tensor] | None
    query2: Tensor | None
    key2: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    attn_bias: Tensor | None
    relative_keys: Tensor | None
    relative_query: Tensor | None
    score_mod_grad: Any
    dropout: float
    dropout_seed: Tensor | None
    deterministic: bool
    batch_invariant: bool
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    score_mod: Any

class AttentionVarlenArguments(TypedDict, total=False):
    """Options of `attention_varlen`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    stride: int | None
    mod_tensors: tuple[Tensor, ...]
    mask_mod: Any
    heads: tuple[int, int] | None
    prefix_lengths: int | Tensor | None
    key_lengths: Tensor | None
    query2: Tensor | None
    key2: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    relative_keys: Tensor | None
    relative_query: Tensor | None
    score_mod_grad: Any
    dropout: float
    dropout_seed: Tensor | None
    deterministic: bool
    batch_invariant: bool
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    score_mod: Any

class DecodeAttentionArguments(TypedDict, total=False):
    """Options of `decode_attention`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    stride: int | None
    mod_tensors: tuple[Tensor, ...]
    mask_mod: Any
    heads: tuple[int, int] | None
    attn_mask: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    attn_bias: Tensor | None
    batch_invariant: bool
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    score_mod: Any

class AttentionPagedArguments(TypedDict, total=False):
    """Options of `attention_paged`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    stride: int | None
    mod_tensors: tuple[Tensor, ...]
    mask_mod: Any
    heads: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    batch_invariant: bool
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    score_mod: Any

class AttentionFp8Arguments(TypedDict, total=False):
    """Options of `attention_fp8`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    prefix_lengths: int | Tensor | None
    key_lengths: Tensor | None
    query_offset: int | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

class AttentionVarlenFp8Arguments(TypedDict, total=False):
    """Options of `attention_varlen_fp8`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    prefix_lengths: int | Tensor | None
    key_lengths: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

class AdditiveAttentionArguments(TypedDict, total=False):
    """Options of `additive_attention`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    keep_first: int
    stride: int | None
    mod_tensors: tuple[Tensor, ...]
    mask_mod: Any
    heads: tuple[int, int] | None
    prefix_lengths: int | Tensor | None
    key_lengths: Tensor | None
    query_offset: int | Tensor | None
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    documents: Tensor | tuple[Tensor, Tensor] | None

class SelectedAttentionArguments(TypedDict, total=False):
    """Options of `selected_attention`; see there."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    key_lengths: Tensor | None
    query_offset: int | Tensor | None
    key_padding_mask: Tensor | None
    documents: Tensor | tuple[Tensor, Tensor] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
