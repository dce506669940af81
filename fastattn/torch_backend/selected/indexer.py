"""DeepSeek's lightning indexer in torch: its scores and its training loss."""

import torch
from torch import Tensor

from ... import tracing
from ...options import Options
from .. import formula, masks
from ..query_chunks import chunks, in_chunks
from .choose import best

# Scores and gathered numbers in memory at once: 64 MiB in fp32.
_AT_ONCE = 2**24


@torch.no_grad()
@tracing.without_autocast
def select(q: Tensor, k: Tensor, w: Tensor, n: int, options: Options) -> Tensor:
    """int32 [B, 1, T_q, n]: keys with the largest scores, in chunks of queries."""
    B, H, T_q, _ = q.shape
    per_query = B * (H + 1) * k.shape[2]
    return torch.cat(
        [
            best(_scores(q[:, :, rows], k, w[:, :, rows], own)[:, None], n)
            for rows, own in chunks(options, T_q, per_query, _AT_ONCE)
        ],
        2,
    )


def loss(
    index: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    lists: Tensor | None,
    options: Options,
) -> Tensor:
    """KL of each query [B, T_q], in fp32 or wider, in chunks of queries recomputed for gradients.

    Args:
        index: q [B, H_I, T_q, D_I], k [B, 1, T_k, D_I] and w [B, H_I, T_q] of the indexer.
        q, k: [B, H_q, T_q, D] and [B, H_k, T_k, D] of the attention, which get no gradient.
        lists: int32 [B, 1, T_q, n], from `ordered_lists`; None: all keys.
        options: of the attention.
    """
    if tracing.autocasting(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return loss(index, q, k, lists, options)
    (B, H_q, T_q, D), (H_k, T_k) = q.shape, k.shape[1:3]
    lists = lists if T_k else None
    q_index, k_index, w = index
    of_attention = H_q * T_k if lists is None else lists.shape[3] * (H_q + H_k * D)
    per_query = B * ((q_index.shape[1] + 1) * T_k + of_attention)
    main, dims = (q_index, k_index, w, q, k, lists), (2, None, 2, 2, None, 2)
    slices = chunks(options, T_q, per_query, _AT_ONCE)
    return in_chunks(_divergence, main, dims, (1,), options, slices)[0]


def _scores(q: Tensor, k: Tensor, w: Tensor, options: Options) -> Tensor:
    """[B, T_q, T_k] in fp32 or wider, -inf where masked."""
    (B, _, T_q, _), T_k = q.shape, k.shape[2]
    q, k = formula.wide(q, None), formula.wide(k, masks.existing_keys(options, T_k, q.device))
    x = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).relu()
    x = torch.einsum("bhqk,bhq->bqk", x, w.to(x.dtype))
    keep = masks.visible(options, B, 1, T_q, T_k, q.device)
    return x if keep is None else torch.where(keep[:, 0], x, float("-inf"))


def _divergence(
    q_index: Tensor, k_index: Tensor, w: Tensor, q: Tensor, k: Tensor, lists: Tensor | None,
    options: Options, _: int,
) -> tuple[Tensor]:  # fmt: skip
    """`loss` of some queries."""
    x = _scores(q_index, k_index, w, options)
    if lists is None:
        p = _attended(q, k, options)
    else:
        named = lists[:, 0].long()
        listed = named < k.shape[2]
        named = torch.where(listed, named, 0)
        x = torch.where(listed, x.gather(-1, named), float("-inf"))
        p = _attended_of_lists(q, k, named, x != float("-inf"), options)
    # Finite in rows without keys, where it is multiplied by 0, so that gradients are 0.
    x = torch.where(x == float("-inf"), torch.finfo(x.dtype).min, x)
    p = (p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)).to(x.dtype)
    return ((torch.xlogy(p, p) - p * x.log_softmax(-1)).sum(-1),)


@torch.no_grad()
def _attended(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Attention weights summed over heads: [B, T_q, T_k]."""
    return formula.normalised(formula.scores(q, k, options), options.sinks)[0].sum(1)


def _attended_of_lists(
    q: Tensor, k: Tensor, named: Tensor, seen: Tensor, options: Options
) -> Tensor:
    """Weights [B, T_q, n] of each query's listed and visible keys, with one batch row per query."""
    B, T_q, n = named.shape
    batch = torch.arange(B, device=k.device)[:, None, None]
    own = k.transpose(1, 2)[batch, named].flatten(0, 1).transpose(1, 2)
    masked = Options(
        query_offset=0, scale=options.scale, softcap=options.softcap, sinks=options.sinks,
        attn_mask=seen.reshape(-1, 1, 1, n),
    )  # fmt: skip
    return _attended(q.transpose(1, 2).reshape(B * T_q, -1, 1, q.shape[3]), own, masked).reshape(
        named.shape
    )
