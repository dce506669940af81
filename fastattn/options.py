"""The options of one attention call: as the caller writes them, and as every backend reads them."""

from typing import Any, NamedTuple, TypedDict

from torch import Tensor

# The places that an operator has for them.
MAX_MOD_TENSORS = 8

# Positions of queries are taken within this distance of the first key: no sequence is as long.
FARTHEST = 2**28

Window = int | tuple[int | None, int | None] | None


class ScoreArguments(TypedDict, total=False):
    """Keyword arguments that `attention` and `attention_varlen` share; see there."""

    causal: bool
    window: Window
    prefix_lengths: int | Tensor | None
    keep_first: int
    stride: int | None
    mask_mod: Any
    mod_tensors: tuple[Tensor, ...]
    key_lengths: Tensor | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    relative_keys: Tensor | None
    relative_query: Tensor | None
    score_mod: Any
    score_mod_grad: Any
    sinks: Tensor | None
    dropout: float
    dropout_seed: Tensor | None
    deterministic: bool


class AttentionArguments(ScoreArguments, total=False):
    """Keyword arguments of `attention` that say what is computed."""

    key_padding_mask: Tensor | None
    query_offset: int | Tensor | None
    attn_mask: Tensor | None
    attn_bias: Tensor | None
    documents: Tensor | tuple[Tensor, Tensor] | None


class Options(NamedTuple):
    """One checked call. None, 0 and False mean that an option was not given.

    Tensors lie on q's device. Those with dims of one size or another are not expanded.
    """

    key_padding_mask: Tensor | None = None  # bool [B, T_k]
    key_lengths: Tensor | None = None  # int [B]
    query_offsets: Tensor | None = None  # int [B]; in place of query_offset
    prefix_lengths: Tensor | None = None  # int [B]
    q_documents: Tensor | None = None  # int [B, T_q]
    k_documents: Tensor | None = None  # int [B, T_k]
    attn_mask: Tensor | None = None  # bool [B or 1, H_q or 1, T_q or 1, T_k or 1]
    alibi_slopes: Tensor | None = None  # fp32 [H_q] or [B, H_q]
    dropout_seed: Tensor | None = None  # int64 [2], given if dropout > 0
    cu_seqlens_q: Tensor | None = None  # int [N + 1]: q is packed, [total_q, H_q, D]
    cu_seqlens_k: Tensor | None = None  # int [N + 1]
    # What follows has gradients.
    attn_bias: Tensor | None = None  # float [B or 1, H_q or 1, T_q or 1, T_k or 1]
    relative_bias: Tensor | None = None  # float [H_q, 2 R + 1]
    relative_keys: Tensor | None = None  # [H_q or H_k or 1, 2 R + 1, D]
    relative_query: Tensor | None = None  # as q
    sinks: Tensor | None = None  # float [H_q]

    mod_tensors: tuple[Tensor, ...] = ()
    query_offset: int | None = 0  # None: packed, each sequence has its own
    left: int | None = None
    right: int | None = None
    causal: bool = False
    keep_first: int = 0
    stride: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    dropout: float = 0.0
    # Whether dQ may be added up by atomics, in an order that is another in each run.
    atomic_dq: bool = False
    mask_mod: Any = None
    score_mod: Any = None
    score_mod_grad: Any = None

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) if `causal` and `window` come to one band around each query, else None."""
        if not self.causal:
            simple = not self.keep_first and self.stride is None
            return (self.left, self.right) if simple else None
        if self.keep_first or self.stride is not None or self.prefix_lengths is not None:
            return None
        return self.left, 0 if self.right is None else min(self.right, 0)

    @property
    def plain(self) -> bool:
        """Whether numbers say it all: there are no tensors, and no functions.

        Nor a stride, of which launchers make a table: a call under the capture of a CUDA graph only
        records the making, and the table must not be taken for one that is filled.
        """
        return (
            self.stride is None
            and self.key_padding_mask is None
            and self.key_lengths is None
            and self.query_offsets is None
            and self.prefix_lengths is None
            and self.q_documents is None
            and self.k_documents is None
            and self.attn_mask is None
            and self.alibi_slopes is None
            and self.dropout_seed is None
            and self.cu_seqlens_q is None
            and self.cu_seqlens_k is None
            and self.attn_bias is None
            and self.relative_bias is None
            and self.relative_keys is None
            and self.relative_query is None
            and self.sinks is None
            and not self.mod_tensors
            and self.mask_mod is None
            and self.score_mod is None
        )

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors beside q, k and v that have gradients, in the order of their fields."""
        return (
            self.attn_bias,
            self.relative_bias,
            self.relative_keys,
            self.relative_query,
            self.sinks,
        )
