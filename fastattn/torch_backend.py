"""Attention by torch's own fused kernel, with the semantics of ours.

It is the fast path on a CPU and the last resort elsewhere. Two things are added to
torch.nn.functional.scaled_dot_product_attention: keys that are padded out are zeroed first, because
torch lets a NaN in them through, and a mask is built only where torch has no flag for it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int | None,
    right: int | None,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_offset: int | Tensor,
    scale: float,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `fastattn.attention`, with every argument checked and the band given by its sides.

    lse is not among torch's outputs: with return_lse the plain formula runs, in fp32 or wider, and
    holds all scores in memory.
    """
    if return_lse or q.numel() == 0 or k.numel() == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        o, lse = reference.attention(
            *(x.to(wide) for x in (q, k, v)),
            window=(left, right),
            key_padding_mask=key_padding_mask,
            key_lengths=key_lengths,
            query_offset=query_offset,
            scale=scale,
            return_lse=True,
        )
        o = o.to(q.dtype)
        return (o, lse.float()) if return_lse else o

    B, _, T_q, _ = q.shape
    T_k = k.shape[2]
    mask = None
    is_causal = False
    # An `if`, since torch takes no symbolic bool: under torch.compile it becomes a guard.
    if right == 0 and left is None and _equals(query_offset, 0):
        is_causal = True
    elif not _sees_all(T_q, T_k, left, right, query_offset):
        mask = _band_mask(T_q, T_k, left, right, query_offset, q.device)
    if key_padding_mask is not None or key_lengths is not None:
        exists = reference.existing_keys(B, T_k, key_padding_mask, key_lengths, q.device)
        k, v = _harmless(k, exists), _harmless(v, exists)
        if is_causal:
            mask, is_causal = _band_mask(T_q, T_k, left, right, query_offset, q.device), False
        exists = exists[:, None, None, :]
        mask = exists.expand(B, 1, T_q, T_k) if mask is None else mask & exists
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if mask is not None and q.device.type != "cpu":
        # On a CPU torch gives rows that see nothing 0 by itself; its CUDA kernels do not all agree.
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o


# Far above any norm of activations, and far below what could overflow in a product of two.
_LARGE = 1e9


def _harmless(x: Tensor, exists: Tensor) -> Tensor:
    """x [B, H, T_k, D] whose hidden rows cannot reach a sum that they are given weight 0 in.

    Zeroing them costs a copy. Eagerly on a CPU it is cheaper to look first whether anything in x is
    NaN, infinite or so large that a product with it might be.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        norm = torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float))
        if norm < _LARGE:
            return x
    return torch.where(exists[:, None, :, None], x, 0.0)


def _equals(query_offset: int | Tensor, number: int) -> bool:
    return not isinstance(query_offset, Tensor) and query_offset == number


def _sees_all(
    T_q: int, T_k: int, left: int | None, right: int | None, query_offset: int | Tensor
) -> bool:
    """Whether the band hides nothing, as for the one query of a decoding step."""
    if left is None and right is None:
        return True
    if isinstance(query_offset, Tensor):
        return False
    reaches_last = right is None or query_offset + right >= T_k - 1
    return reaches_last and (left is None or T_q - 1 + query_offset - left <= 0)


def _band_mask(
    T_q: int,
    T_k: int,
    left: int | None,
    right: int | None,
    query_offset: int | Tensor,
    device: torch.device,
) -> Tensor:
    """bool [1 or B, 1, T_q, T_k], True where the band lets the query see the key."""
    if isinstance(query_offset, Tensor):
        return reference.visible_mask(
            T_q, T_k, window=(left, right), query_offset=query_offset, device=device
        )
    mask = torch.ones(1, 1, T_q, T_k, dtype=torch.bool, device=device)
    if right is not None:
        mask = mask.tril(query_offset + right)
    if left is not None:
        mask = mask.triu(query_offset - left)
    return mask
