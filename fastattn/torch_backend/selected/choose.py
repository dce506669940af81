"""Scores of key blocks in torch."""

import torch
from torch import Tensor

from ... import tracing


def block_scores(
    q: Tensor, k: Tensor, lse: Tensor | None, H_s: int, per_block: int, pool: tuple[int, int],
    count: int, rows: tuple[int, int], offset: int, scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """`kernels.selected.choose.launch_block_scores` [B, H_s, rows, count] in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    B, H_q = q.shape[:2]
    H_k, T_k = k.shape[1:3]
    own = slice(*rows)
    q = torch.unflatten(q[:, :, own].to(wide), 1, (H_k, H_q // H_k))
    x = torch.einsum("bhgqd,bhkd->bhgqk", q, k.to(wide)).flatten(1, 2) * scale
    key = torch.arange(T_k, device=q.device)
    query = torch.arange(*rows, device=q.device)[:, None] + offset
    seen = key * pool[1] + pool[0] - 1 <= query if causal else torch.ones_like(query + key).bool()
    if lse is not None:
        x = (x - lse[:, :, own, None]).exp()
    x = torch.where(seen, x, float("-inf")).reshape(B, H_s, H_q // H_s, *x.shape[2:])
    x = _over(x, 2, lse is not None)
    scores = q.new_full((*x.shape[:3], count), float("-inf"), dtype=wide)
    for back in range(pool[0] // pool[1]):
        # Key i counts in its own block and, `back` strides on, in blocks that it overlaps.
        width = count * per_block
        moved = torch.nn.functional.pad(x, (back, width), value=float("-inf"))[..., :width]
        part = _over(moved.reshape(*x.shape[:3], count, per_block), -1, lse is not None)
        scores = _over(torch.stack((scores, part)), 0, lse is not None)
    return scores


def best(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest along the last dim, int32; -1 for -inf."""
    if not tracing.always(scores.shape[-1] >= n):
        scores = torch.nn.functional.pad(scores, (0, n), value=float("-inf"))
    largest, places = scores.topk(n, dim=-1)
    return places.masked_fill(largest == float("-inf"), -1).to(torch.int32)


def _over(x: Tensor, dim: int, weights: bool) -> Tensor:
    """Sum (weights) or maximum along a dim, ignoring -inf; -inf if all are."""
    largest = x.amax(dim)
    if not weights:
        return largest
    return torch.where(largest == float("-inf"), largest, x.clamp(min=0).sum(dim))
