"""Attention in the place of product, softmax and product: what a rewritten graph calls."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional.fused_attention import attention
from ..calls import running
from ..sdpa import LOWEST_BIAS, bounded_bias


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    factors: list[Tensor],
    terms: list[tuple[Tensor, float, Any]],
    further: tuple[Tensor, float] | None,
    viewed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Attention of q [..., T_q, D] and k [..., D, T_k], replacing product, softmax and product.

    Args:
        viewed: v has the leading dims of k grouped in another way, and so has the result.
    """
    running.fused = True
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    shape, outer = (*_broadcast(q, k), q.shape[-2], k.shape[-1]), v.shape[:-2]
    for factor in factors:
        q = q * factor
    if viewed:
        v = v.reshape(*shape[:-2], *v.shape[-2:])
    batch = _broadcast(q, k, v)
    if dropout >= 1:  # a dynamic number
        o = F.dropout(q @ k @ v, 1.0)
    else:
        mask, bias, filled = _masks(terms, shape)
        if filled is not None and bias is not None:
            # A fully masked row depends on no score and gives no score a gradient.
            shown = bias if mask is None else torch.where(mask, bias, -math.inf)
            blind = (filled | (shown == -math.inf)).all(-1, keepdim=True)
            q = q.masked_fill(blind, 0)
            if further is None:  # the lse of numbers as low as these does not count keys
                largest = shown.detach().amax(-1, keepdim=True).clamp(min=LOWEST_BIAS)
                bias = bias - torch.where(blind, largest, 0.0)
        heads = _heads(batch, k.shape[:-2], v.shape[:-2])
        k, v = (_in_four_dims(x, (*batch[:-1], *heads)) for x in (k.mT, v))
        mask, bias = (_mask_in_four_dims(x, batch) for x in (mask, bias))
        options: dict[str, Any] = {"attn_mask": mask, "attn_bias": bias}
        options |= {"scale": scale, "dropout": dropout}
        q, k, v = _in_four_dims(q, batch).to(common), k.to(common), v.to(common)
        if further is None:
            o = attention(q, k, v, **options)
        else:
            o, lse = attention(q, k, v, return_lse=True, **options)
            z = (further[0] * further[1]).float().logsumexp(-1).expand(*batch, -1)
            share = torch.sigmoid(lse.clamp(min=LOWEST_BIAS) - z.reshape(lse.shape))
            o = o * share.unsqueeze(-1)
    return o.reshape(*(outer if viewed else batch), *o.shape[-2:]).to(dtype)


def _broadcast(*tensors: Tensor) -> tuple[int, ...]:
    """Leading dims of products."""
    shapes = [x.shape[:-2] for x in tensors]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _heads(batch: Any, *shapes: Any) -> tuple[int, ...]:
    """Number of heads of keys and values, if there are any: one stays one."""
    if all(x[-1:] in ((), (1,)) for x in map(tuple, shapes)):
        return (1,) if batch else ()
    return tuple(batch[-1:])


def _in_four_dims(x: Tensor, batch: Any) -> Tensor:
    x = x.expand(*batch, *x.shape[-2:])
    return x.flatten(0, -4) if len(batch) > 2 else x[(None,) * (2 - len(batch))]


def _mask_in_four_dims(x: Tensor | None, batch: Any) -> Tensor | None:
    if x is None or len(batch) < 3 or x.dim() < 4:
        return x
    return _in_four_dims(x, (*batch[:-1], x.shape[-3]))


def _masks(
    terms: list[tuple[Tensor, float, Any]], shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The mask (True = visible), the bias, and the positions masked by a finite number."""
    mask = bias = filled = None
    for x, number, sizes in reversed(terms):  # in order, as fills overwrite
        x = x if sizes is None else _as_scores(x, sizes, shape)
        x = x if x.dim() >= 2 else x.reshape(1, -1)
        if x.dtype != torch.bool:
            x = bounded_bias(x if number == 1 else x * number)
            bias = x if bias is None else bounded_bias(bias + x)
        elif number == -math.inf:
            mask = ~x if mask is None else mask & ~x
        else:
            bias = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias
            bias = torch.where(x, x.new_full((1, 1), number, dtype=torch.float32), bias)
            mask = mask if mask is None else mask | x
            filled = x if filled is None else filled | x
    return mask, bias, filled


def _as_scores(x: Tensor, sizes: list[int], shape: tuple[int, ...]) -> Tensor:
    """Reshape a bias or mask of a view of the scores to [..., T_q, T_k]."""
    explicit = math.prod(n for n in sizes if n != -1)
    return x.expand([math.prod(shape) // explicit if n == -1 else n for n in sizes]).reshape(shape)
