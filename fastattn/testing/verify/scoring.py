"""Check statistics against explicit formulas."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import reference
from ...checks import FARTHEST
from ...functional.statistics import attention_statistics, attention_weights
from ..budget import assert_all_within_budget, assert_within_budget
from ..orders import worst_naive


def _in_dtype(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Float options in the dtype of the inputs; slopes stay fp32."""
    return {
        name: x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and name != "alibi_slopes"
        else x
        for name, x in options.items()
    }


def statistics_oracle(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Entropy, weight received, weights and distance, from the oracle's output for unit vectors."""
    T = k.shape[2]
    v = torch.eye(T, dtype=q.dtype, device=q.device).expand(*k.shape[:2], T, T)
    weights, lse = reference.attention(q, k, v, return_lse=True, **options)
    # Without the weights that are 0, at which the derivative is infinite.
    seen = weights.where(weights > 0, 1.0)
    entropy = -torch.special.xlogy(seen, seen).sum(-1)
    if "sinks" in options:
        sink = torch.exp(options["sinks"][:, None] - lse)
        entropy = entropy - torch.special.xlogy(sink, sink)
    # Large values overflow fp16.
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    distance = (wide * _apart(q, k, **options)).sum(-1)
    return entropy, weights.sum(-2), weights, distance


def _apart(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """|p - j| of every query and key."""
    if "positions" in options:
        of_q, of_k = options["positions"]
        return (of_q[:, None, :, None].long() - of_k[:, None, None, :].long()).abs()
    offset = torch.as_tensor(options.get("query_offset", k.shape[2] - q.shape[2]), device=q.device)
    offset = offset.view(-1, 1, 1, 1).long().clamp(-FARTHEST, FARTHEST)
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return (offset + rows[:, None] - keys).abs()


def assert_statistics(q: Tensor, k: Tensor, backend: str | None, options: dict[str, Any]) -> float:
    """Check every statistic and the largest weights; the worst share of the budget."""
    top = 3
    options = _in_dtype(options, q.dtype)
    exact = statistics_oracle(q.double(), k.double(), **_in_dtype(options, torch.float64))
    naive = worst_naive(exact, lambda: statistics_oracle(q, k, **options))
    statistics = attention_statistics(q, k, top=top, backend=backend, **options)
    weights = attention_weights(q, k, backend=backend, **options)
    names = ("entropy", "received", "weights", "distance")
    ours = (statistics.entropy, statistics.received, weights, statistics.distance)
    share = assert_all_within_budget(names, ours, exact, naive)

    positions, T_k = statistics.top_positions, k.shape[2]
    expected, rounded = (
        pad(x[2].sort(-1, descending=True).values[..., :top], (0, max(0, top - T_k)))
        for x in (exact, naive)
    )
    of_top = assert_within_budget("top_weights", statistics.top_weights, expected, rounded)
    seen = expected > 0
    assert torch.equal(positions == -1, ~seen), "keys without weight are listed"
    assert torch.all(statistics.top_weights[~seen] == 0), "a key without weight has some"
    if not T_k:
        return max(share, of_top)
    # Weights equal within rounding may come in either order.
    listed = exact[2].gather(-1, positions.clamp(min=0)).where(seen, 0.0).to(q.dtype)
    assert_within_budget("weights at top_positions", listed, expected, rounded)
    ordered = positions.where(seen, -1 - torch.arange(top, device=q.device)).sort(-1).values
    assert torch.all(ordered.diff() > 0), "a key is listed twice"
    return max(share, of_top)
