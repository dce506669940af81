"""Additive attention as a torch formula, differentiable any number of times."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import tracing
from ..options import Options
from . import formula, masks
from .query_chunks import chunks

# Numbers of tanh in memory at once: 64 MiB in fp32.
_HIDDEN = 2**24


def attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse, computed in fp32 or wider.

    In chunks of queries, recomputed for gradients, without a [T_q, T_k, D] tensor; under
    torch.compile in one, whose gradients may hold it.

    Args:
        q, k: [B, H_q, T_q, D] and [B, H_k, T_k, D], projected.
        v: [B, H_k, T_k, D_v].
        u: [H_q, D].
        options: only masks are used.
    """
    if tracing.autocasting(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return attention(q, k, v, u, options)
    B, H_q, _, D = q.shape
    T_k = v.shape[2]
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, u = (x.to(wide) for x in (q, k, v, u))
    exists = masks.existing_keys(options, T_k, q.device)
    if exists is not None:
        k, v = (torch.where(exists[:, None, :, None], x, 0.0) for x in (k, v))
    outputs, lses = [], []
    slices: Iterable[tuple[slice, Options]] = [(slice(None), options)]
    # A compiler would unroll the loop, for each length; of one chunk it fuses tanh and sums.
    if not torch.compiler.is_compiling():
        slices = chunks(options, q.shape[2], B * H_q * T_k * D, _HIDDEN)
    for rows, own in slices:
        inputs: tuple[Any, ...] = (q[:, :, rows], k, v, u, own)
        # torch.func does not support saved-tensor hooks, which checkpointing uses.
        if torch.is_grad_enabled() and not tracing.transforming():
            o, lse = checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            o, lse = _attend(*inputs)
        outputs.append(o)
        lses.append(lse)
    return torch.cat(outputs, 2).to(dtype), torch.cat(lses, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    B, H_q, T_q, D = q.shape
    _, H_k, T_k, D_v = v.shape
    G = H_q // H_k
    hidden = q.reshape(B, H_k, G, T_q, 1, D) + k[:, :, None, None]
    # Not by einsum: a compiler fuses this sum and its gradients with tanh.
    x = (hidden.tanh() * u.reshape(H_k, G, 1, 1, D)).sum(-1).reshape(B, H_q, T_q, T_k)
    keep = masks.visible(options, B, H_q, T_q, T_k, q.device)
    if keep is not None:
        x = torch.where(keep, x, float("-inf"))
    weights, lse = formula.normalised(x, None)
    o = torch.einsum("bhgqk,bhkd->bhgqd", weights.reshape(B, H_k, G, T_q, T_k), v)
    return o.reshape(B, H_q, T_q, D_v), lse
