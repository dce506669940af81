"""Attention weights of a layer for the inputs of one call."""

from typing import Any

import torch
from torch import Tensor

from ..functional.additive import additive_attention
from ..functional.statistics import attention_weights
from ..rotary import RotaryTables
from .checks import check_unprojected, checked_tables
from .cross_attention import CrossGQAttention, ProjectedMemory
from .latent_attention import MultiheadLatentAttention
from .relative import relative_terms
from .self_attention import GQAttention
from .sharded import local_part


@torch.no_grad()
def self_attention_weights(
    layer: GQAttention,
    x: Tensor,
    *,
    positions: Tensor | None = None,
    rotary_tables: RotaryTables | None = None,
    **masks: Any,
) -> Tensor:
    """Attention weights of `layer(x, ...)` without dropout, by `fastattn.attention_weights`.

    Args:
        layer: a self-attention of this package.
        x, positions, rotary_tables: as for `GQAttention.forward` without a cache.
        masks: key_padding_mask, key_lengths, prefix_lengths and documents, likewise.

    Returns:
        [B, H_q, T, T], in fp32 or wider; with "additive" scoring in x's dtype. Rows add up to 1,
        with sinks to less, and to 0 if a token sees nothing.
    """
    rotary_dim = None if layer.rotary is None else layer.rotary_dim
    tables = checked_tables(x, positions, rotary_tables, rotary_dim)
    q, k, _ = layer.queries_keys_values(x, layer.rotation(x, positions, tables), None)
    terms = relative_terms(layer.relative, q, layer.v_head_dim)
    masks = {**layer.mask_options(), **masks}
    if layer.scoring == "additive":
        return _additive_weights(q, k, local_part(layer.score_vector), layer.backend, masks)
    scores = layer.score_options(terms.bias)
    if terms.keys is not None:
        scores |= {"relative_keys": terms.keys, "relative_query": terms.key_query}
    return attention_weights(terms.query, k, backend=layer.backend, **masks, **scores)


@torch.no_grad()
def cross_attention_weights(
    layer: CrossGQAttention,
    x: Tensor,
    memory: Tensor | ProjectedMemory,
    *,
    memory_lengths: Tensor | None = None,
    memory_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attention weights of `layer(x, memory, ...)` over the memory, without dropout.

    Args:
        layer: a cross-attention of this package.
        x, memory, memory_lengths, memory_padding_mask: as for `CrossGQAttention.forward`.

    Returns:
        [B, H_q, T, S], as in `self_attention_weights`.

    Raises:
        ValueError: a projected memory comes with lengths or a mask.
    """
    if isinstance(memory, ProjectedMemory):
        check_unprojected(memory_lengths, memory_padding_mask)
    else:
        memory = layer.project_memory(memory, memory_lengths, padding_mask=memory_padding_mask)
    q = layer.project_queries(x)
    _, _, lengths, padding_mask = memory
    masks: dict[str, Any] = {"key_lengths": lengths, "key_padding_mask": padding_mask}
    if layer.scoring == "additive":
        return _additive_weights(q, memory.k, local_part(layer.score_vector), layer.backend, masks)
    masks |= layer.score_options()
    return attention_weights(q, memory.k, backend=layer.backend, **masks)


@torch.no_grad()
def latent_attention_weights(
    layer: MultiheadLatentAttention,
    x: Tensor,
    *,
    rotary_tables: RotaryTables | None = None,
    **masks: Any,
) -> Tensor:
    """Attention weights of `layer(x, ...)`, as `self_attention_weights`: [B, H, T, T]."""
    q, k = layer.queries_keys(x, rotary_tables)
    return attention_weights(q, k, **layer.attention_options(), **masks)


def _additive_weights(
    q: Tensor, k: Tensor, u: Tensor, backend: str | None, masks: dict[str, Any]
) -> Tensor:
    """Attention to the identity as values: the output is the weights."""
    if k.shape[2] == 0:
        return q.new_empty(*q.shape[:3], 0)
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    v = identity.expand(*k.shape[:2], *identity.shape)
    return additive_attention(q, k, v, u, backend=backend, **masks)
