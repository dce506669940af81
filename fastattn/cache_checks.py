"""Argument checks that the caches share; each error names the argument."""

import torch
from torch import Tensor

from .rotary import check_rotary_style

Rotary = tuple[Tensor, Tensor]


def check_sizes(**sizes: int) -> None:
    """Every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")


def check_tokens(
    k: Tensor, v: Tensor, like_k: Tensor, like_v: Tensor, batch: int, dtype: torch.dtype
) -> None:
    """k [B, H_k, T, D] and v [B, H_k, T, D_v] fit buffers [*, H_k, *, D] and [*, H_k, *, D_v].

    Raises:
        ValueError: a shape, the dtype or the device disagrees.
        RuntimeError: one requires grad while grad mode is on.
    """
    for name, x, like in (("k", k, like_k), ("v", v, like_v)):
        heads, width = like.shape[-3], like.shape[-1]
        if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (batch, heads, width):
            raise ValueError(
                f"{name} must have shape [{batch}, {heads}, T, {width}] to match the cache, "
                f"got {tuple(x.shape)}"
            )
        if x.dtype != dtype:
            raise ValueError(
                f"{name} must have the cache's dtype {dtype}, got {x.dtype}; "
                "build the cache with the dtype that attention runs in"
            )
        if x.device != like.device:
            raise ValueError(f"{name} must be on the cache's device {like.device}, got {x.device}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k and v must hold the same number of tokens, got {k.shape[2]} and {v.shape[2]}"
        )
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "KVCache stores no graph, but k or v requires grad: append under torch.no_grad() "
            "or torch.inference_mode(), or detach them"
        )


def check_rotary(
    rotary: Rotary | None, style: str, q: Tensor | None, k: Tensor, bound: int
) -> None:
    """Tables [N, R // 2] that cover positions 0..bound-1, and q [B, H_q, T, D] that goes with k.

    Raises:
        ValueError: a shape, dtype or device disagrees, the tables are too short, the style is
            unknown, or q is given without tables.
    """
    check_rotary_style(style)
    if rotary is None:
        if q is not None:
            raise ValueError("q is only rotated: give it together with rotary=(cos, sin)")
        return
    cos, sin = rotary
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dim() != 2 or x.shape != cos.shape or 2 * x.shape[1] > k.shape[3] or not x.shape[1]:
            raise ValueError(
                f"rotary {name} must have shape [N, R // 2] with 0 < R <= {k.shape[3]}, like the "
                f"other table, got {tuple(x.shape)}"
            )
        if x.dtype != torch.float32 or x.device != k.device:
            raise ValueError(
                f"rotary {name} must be float32 on {k.device}, got {x.dtype} on {x.device}"
            )
    if bound > cos.shape[0]:
        raise ValueError(
            f"rotary tables must have a row for every position: {bound} are needed, "
            f"got {cos.shape[0]}"
        )
    if q is None:
        return
    B, _, T, D = k.shape
    if q.dim() != 4 or (q.shape[0], *q.shape[2:]) != (B, T, D):
        raise ValueError(f"q must have shape [{B}, H_q, {T}, {D}], got {tuple(q.shape)}")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(f"q must be {k.dtype} on {k.device}, got {q.dtype} on {q.device}")
