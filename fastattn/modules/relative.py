"""Relative position terms of a layer, on its scores and on its values.

For a query i at position p and a key j, with all distances p - j clipped to [-R, R],

    score_ij = scale * (query_i . k_j + key_query_i . keys[p - j]) + bias[p - j]
    o_i      = sum_j a_ij (v_j + values[p - j])

Kernels compute the scores. `relative_values` computes the term on the values (Shaw et al. 2018,
arXiv 1803.02155, equation 3) with one weight per distance in memory, not one per pair of tokens.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import tracing
from ..functional.fused_attention import attention


class RelativeTerms(NamedTuple):
    """Tensors that a relative scheme derives from a call's queries, with one R for all tables.

    query: [B, H_q, T_q, D], replaces q.
    bias: [H_q, 2 R + 1], row R + d for distance d.
    keys: [H, 2 R + 1, D], H one of H_q, H_k and 1.
    key_query: as query; multiplied with keys. None: query.
    values: [H_q or 1, 2 R + 1, D_v].
    """

    query: Tensor
    bias: Tensor | None = None
    keys: Tensor | None = None
    key_query: Tensor | None = None
    values: Tensor | None = None


class RelativeScheme(Protocol):
    """Interface of `GQAttention`'s `relative`; see `fastattn.models.positions`.

    Attributes:
        has_keys: the terms have keys, which the decode kernels do not support.
        has_values: the terms have values.
    """

    @property
    def has_keys(self) -> bool: ...

    @property
    def has_values(self) -> bool: ...

    def __call__(self, q: Tensor) -> RelativeTerms: ...


class _Call(NamedTuple):
    """Further arguments that determine the scores."""

    scale: float
    causal: bool
    query_offset: int | Tensor
    key_lengths: Tensor | None
    key_padding_mask: Tensor | None
    backend: str | None


def relative_terms(scheme: RelativeScheme | None, q: Tensor, value_dim: int) -> RelativeTerms:
    """A scheme's terms for queries [B, H_q, T_q, D], and for values of value_dim channels.

    Raises:
        ValueError: the value terms have another number of channels.
    """
    terms = RelativeTerms(q) if scheme is None else scheme(q)
    if terms.values is not None and terms.values.shape[-1] != value_dim:
        raise ValueError(
            f"relative must have values of v_head_dim={value_dim} channels, "
            f"got {terms.values.shape[-1]}"
        )
    return terms


def relative_values(
    k: Tensor,
    lse: Tensor,
    terms: RelativeTerms,
    *,
    scale: float | None,
    causal: bool,
    query_offset: int | Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """sum_j a_ij values[p - j], for the weights a of `attention` with the same arguments.

    The weight of each distance within R is exp(score - lse); the keys at that distance are a view
    of k. All farther keys share a vector, so only the sum of their weights is needed: behind the
    query exp(lse of attention to the far keys alone - lse), ahead of it the rest up to 1. Needs
    memory for [B, H_q, T_q, 2 R + 1] numbers. Differentiable.

    Args:
        k: [B, H_k, T_k, D].
        lse: fp32 [B, H_q, T_q], of attention(terms.query, k, ...) with the terms' keys and bias.
        terms: must have values.
        scale, causal, query_offset, key_lengths, key_padding_mask, backend: arguments of the call.

    Returns:
        [B, H_q, T_q, D_v] in k's dtype.
    """
    values = terms.values
    assert values is not None
    T_q, T_k, D = terms.query.shape[2], k.shape[2], k.shape[3]
    if T_q == 0:
        return terms.query.new_zeros(*terms.query.shape[:3], values.shape[2])
    offset = T_k - T_q if query_offset is None else query_offset
    factor = D**-0.5 if scale is None else scale
    call = _Call(factor, causal, offset, key_lengths, key_padding_mask, backend)
    if not tracing.autocasting(k.device):
        return _weighted_vectors(k, lse, terms, values, call)
    # Autocast would compute the products in its own dtype.
    terms = terms._replace(keys=None if terms.keys is None else terms.keys.to(k.dtype))
    with torch.autocast(k.device.type, enabled=False):
        return _weighted_vectors(k, lse, terms, values, call)


def _weighted_vectors(
    k: Tensor, lse: Tensor, terms: RelativeTerms, values: Tensor, call: _Call
) -> Tensor:
    """sum_j a_ij values[p - j]: near distances one by one, far ones together."""
    R = values.shape[1] // 2
    wide = torch.promote_types(k.dtype, torch.float32)
    seen = lse > float("-inf")
    lse = torch.where(seen, lse, 0.0).to(wide)
    near = _near_weights(k, lse, terms, R, call)
    beyond = seen.to(wide) - near.sum(-1)
    table = values.to(wide)
    o = near @ table[:, 1 : 2 * R]
    behind = beyond
    if not call.causal:
        behind = torch.exp(_far_lse(k, terms, R, call).to(wide) - lse)
        o = o + (beyond - behind)[..., None] * table[:, None, 0]
    o = o + behind[..., None] * table[:, None, 2 * R]
    return o.to(k.dtype)


def _near_weights(k: Tensor, lse: Tensor, terms: RelativeTerms, R: int, call: _Call) -> Tensor:
    """[B, H_q, T_q, 2 R - 1]: a_ij for distances -(R - 1)..R - 1; 0 without a key."""
    B, H_q, T_q, _ = terms.query.shape
    H_k, T_k = k.shape[1:3]
    # Positions of the keys from R - 1 before the first query to R - 1 after the last.
    step = torch.arange(T_q + 2 * R - 2, device=k.device) - (R - 1)
    offset = call.query_offset
    positions = (offset[:, None] if isinstance(offset, Tensor) else offset) + step
    positions = positions.expand(B, -1)
    index = positions.clamp(0, max(T_k - 1, 0))
    exists = (positions >= 0) & (positions < T_k)
    if call.key_lengths is not None:
        exists = exists & (positions < call.key_lengths[:, None])
    if call.key_padding_mask is not None:
        exists = exists & call.key_padding_mask.gather(1, index)
    rows = torch.arange(B, device=k.device)[:, None, None]
    heads = torch.arange(H_k, device=k.device)[:, None]
    around = torch.where(exists[:, None, :, None], k[rows, heads, index[:, None]], 0.0)

    q = terms.query.to(lse.dtype).reshape(B, H_k, H_q // H_k, T_q, k.shape[3])
    around = around.to(lse.dtype)[:, :, None]
    scores, visible = [], []
    for d in range(1 - R, R):
        keys = around.narrow(3, R - 1 - d, T_q)
        scores.append((q * keys).sum(-1))
        ahead = call.causal and d < 0
        visible.append(exists.narrow(1, R - 1 - d, T_q) & (not ahead))
    x = torch.stack(scores, dim=-1).flatten(1, 2)  # [B, H_q, T_q, 2 R - 1]
    if terms.keys is not None:
        query = terms.query if terms.key_query is None else terms.key_query
        table = terms.keys[:, 1 : 2 * R].to(lse.dtype)
        x = x + query.to(lse.dtype) @ _for_each_head(table, H_q).mT
    x = x * call.scale
    if terms.bias is not None:
        x = x + terms.bias[:, None, 1 : 2 * R].to(lse.dtype)
    keep = torch.stack(visible, dim=-1)[:, None]
    return torch.exp(torch.where(keep, x, float("-inf")) - lse[..., None])


def _far_lse(k: Tensor, terms: RelativeTerms, R: int, call: _Call) -> Tensor:
    """fp32 [B, H_q, T_q]: lse of the keys at distances of R and more."""
    _, lse = attention(
        terms.query,
        k,
        k[..., :1].detach(),
        # Keys at least R before the query.
        causal=True,
        query_offset=call.query_offset - R,
        key_lengths=call.key_lengths,
        key_padding_mask=call.key_padding_mask,
        scale=call.scale,
        relative_keys=None if terms.keys is None else terms.keys[:, 2 * R :],
        relative_query=terms.key_query,
        relative_bias=None if terms.bias is None else terms.bias[:, 2 * R :],
        return_lse=True,
        backend=call.backend,
    )
    return lse


def _for_each_head(table: Tensor, H_q: int) -> Tensor:
    """Repeat [H, ...] to [H_q, ...]; unchanged if all heads share one."""
    heads = table.shape[0]
    return table if heads == 1 else table.repeat_interleave(H_q // heads, dim=0)
