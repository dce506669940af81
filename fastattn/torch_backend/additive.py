"""Additive attention as a torch formula, differentiable any number of times."""

import torch
from torch import Tensor

from .. import tracing
from ..options import Options
from . import formula, masks
from .query_chunks import chunks, in_chunks

# Numbers of tanh in memory at once: 64 MiB in fp32.
_HIDDEN = 2**24


@tracing.without_autocast
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
    B, H_q, _, D = q.shape
    T_k = v.shape[2]
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, u = (x.to(wide) for x in (q, k, v, u))
    exists = masks.existing_keys(options, T_k, q.device)
    if exists is not None:
        k, v = (torch.where(exists[:, None, :, None], x, 0.0) for x in (k, v))
    if torch.compiler.is_compiling():  # not in a loop, so that tanh and sums are fused
        o, lse = _attend(q, k, v, u, options)
        return o.to(dtype), lse
    slices = chunks(options, q.shape[2], B * H_q * T_k * D, _HIDDEN)
    o, lse = in_chunks(_attend, (q, k, v, u), (2, None, None, None), (2, 2), options, slices)
    return o.to(dtype), lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, options: Options, first_query: int = 0
) -> tuple[Tensor, Tensor]:
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
