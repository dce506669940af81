"""Statistics of attention weights in torch, for any dtype."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import tracing
from ..options import Options
from . import formula, masks
from .query_chunks import chunks, in_chunks

# Scores in memory at once: 256 MiB in fp32.
_SCORES = 2**26
_FP32 = torch.float32


Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Compute = Callable[[Tensor, Tensor, Tensor | None, int, Options], tuple[Tensor, ...]]


def attention_statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> Statistics:
    """Entropy, weight received, largest weights and their keys, distance; in chunks of rows."""
    received = q.new_zeros(*q.shape[:2], k.shape[2], dtype=torch.promote_types(q.dtype, _FP32))
    parts = []
    for rows, own in _chunks(q, k, options):
        part = of_rows(q[:, :, rows], k, None if lse is None else lse[:, :, rows], top, own)
        received = received + part[1]
        parts.append(part)
    entropy, _, largest, positions, distance = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return entropy, received, largest, positions, distance


def _chunks(q: Tensor, k: Tensor, options: Options) -> Iterator[tuple[slice, Options]]:
    B, H_q, T_q, _ = q.shape
    return chunks(options, T_q, B * H_q * k.shape[2], _SCORES)


def of_rows(q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options) -> Statistics:
    """`attention_statistics` of some rows, differentiable."""
    x, p, lse = _scored(q, k, lse, options)
    seen = x > float("-inf")
    # Finite in rows without keys, where it is multiplied by 0, so that gradients are 0.
    finite = torch.where(seen, x, 0.0)
    lse = torch.where(lse == float("-inf"), 0.0, lse)
    entropy = _surprise(p, finite, lse[..., None]).sum(-1)
    if options.sinks is not None:
        sink = options.sinks.to(x.dtype)[:, None]
        entropy = entropy + _surprise((sink - lse).exp(), sink, lse)
    apart = masks.distances(options, q.shape[2], k.shape[2], q.device).abs()
    # Sort by score, as small weights round to 0; stable, to keep the lowest position.
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    listed = seen.gather(-1, order)
    missing = (0, top - order.shape[-1])
    largest = torch.nn.functional.pad(torch.where(listed, p.gather(-1, order), 0.0), missing)
    places = torch.nn.functional.pad(torch.where(listed, order, -1), missing, value=-1)
    return entropy, p.sum(-2), largest, places, (p * apart.to(p.dtype)).sum(-1)


def differentiable(
    compute: Compute, of_some: Compute, q: Tensor, k: Tensor, lse: Tensor | None, top: int,
    options: Options,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`compute` in chunks of rows, differentiable by `of_some`, the same of some rows."""
    if tracing.transforming() or torch.compiler.is_compiling():
        return of_some(q, k, lse, top, options)

    def of_chunk(*inputs: Any) -> tuple[Tensor, ...]:
        q, k, lse, own, _ = inputs
        return of_some(q, k, lse, top, own)

    # The weight received by a key is a sum over all queries.
    of_results = (2, None, 2, 2, 2) if of_some is of_rows else (2,)
    return in_chunks(
        of_chunk, (q, k, lse), (2, None, 2), of_results, options, _chunks(q, k, options),
        at_once=lambda *_: compute(q, k, lse, top, options),
    )  # fmt: skip


def largest_scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """The largest score of each query, fp32 or wider [B, H_q, T_q], or packed [H_q, total_q]."""
    if options.cu_seqlens_q is not None:
        rows = [q.new_empty(q.shape[1], 0, dtype=torch.promote_types(q.dtype, torch.float32))]
        for n, _, queries, keys, own in formula.sequences(options, q.shape[0], k.shape[0]):
            one_q, one_k = (formula.as_rows(x) for x in (q[queries], k[keys]))
            rows.append(_largest(one_q, one_k, own, n)[0])
        largest = torch.cat(rows, 1)
        unowned = q.shape[0] - largest.shape[1]
        return torch.nn.functional.pad(largest, (0, unowned), value=float("-inf"))
    return _largest(q, k, options)


def _largest(q: Tensor, k: Tensor, options: Options, first_row: int = 0) -> Tensor:
    parts = []
    for rows, own in _chunks(q, k, options):
        x = formula.scores(q[:, :, rows], k, own, first_row=first_row)
        nothing = x.new_full((*x.shape[:-1], 1), float("-inf"))
        parts.append(torch.cat((x, nothing), -1).amax(-1))
    return torch.cat(parts, 2)


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor | None, _: int, options: Options
) -> tuple[Tensor]:
    """All weights [B, H_q, T_q, T_k], in fp32 or wider."""
    return (_scored(q, k, lse, options)[1],)


@tracing.without_autocast
def attention_with_weights(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dropout: float
) -> tuple[Tensor, Tensor]:
    """o and its weights [B, H, T_q, T_k], fp32 or wider, of a call with masks and a bias alone.

    Differentiable; computes scores once. dropout: torch's, which the weights show.
    """
    bias, blind = _bias_of_masks(q, k, options)
    exists = masks.existing_keys(options, k.shape[2], q.device)
    query, key, value = formula.wide(q, None), formula.wide(k, exists), formula.wide(v, exists)
    x = (query * options.scale) @ key.mT
    x = x if bias is None else x + bias
    p = formula.normalised(x, None)[0] if tracing.in_forward_mode() else x.softmax(-1)
    p = p if blind is None else torch.where(blind, 0.0, p)
    p = torch.nn.functional.dropout(p, dropout) if dropout else p
    return (p @ value).to(q.dtype), p


def _bias_of_masks(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor | None, Tensor | None]:
    """(Summand of scores, -inf for hidden keys; rows without keys, if any).

    Scores of such rows stay finite, as their gradients have to. A sum is faster than torch.where.
    """
    bias, _ = masks.added_scores(q, k.shape[2], options).exactly(options)
    if bias is None:
        return None, None
    if bias.dtype == torch.bool:
        bias = masks.added(bias, q.dtype)
    blind = (bias == float("-inf")).all(-1, keepdim=True)
    if tracing.host_knows(blind) and not blind.any():
        return bias, None
    return torch.where(blind, 0.0, bias), blind


@tracing.without_autocast
def _scored(
    q: Tensor, k: Tensor, lse: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and lse in fp32 or wider."""
    x = formula.scores(q, k, options)
    if lse is None:
        p, lse = formula.normalised(x, options.sinks)
    else:
        p = torch.exp(x - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    # Masked keys have weight 0, in rows of NaN too.
    return x, torch.where(x == float("-inf"), 0.0, p), lse


def _surprise(p: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """-p ln p of weights p = exp(x - lse); 0 for p = 0."""
    return torch.where(p == 0, 0.0, p * (lse - x))
