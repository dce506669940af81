"""Check statistics and additive attention against explicit formulas."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import reference
from ...checks import FARTHEST
from ...functional.additive import additive_attention
from ...functional.statistics import attention_statistics, attention_weights
from ..budget import assert_all_within_budget, assert_within_budget
from ..compare import assert_all_near
from ..inputs import to_device
from ..orders import RUNS, worst_naive

ADDITIVE_RESULTS = ("o", "lse", "dq", "dk", "dv", "du", "dw_query", "dw_key")


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


def additive_formula(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor, w_key: Tensor, **masks: Any
) -> tuple[Tensor, Tensor]:
    """The explicit formula, with a [B, H_q, T_q, T_k, hidden] tensor."""
    a = torch.einsum("bhtd,...hcd->bhtc" if w_query.dim() == 3 else "bhtd,cd->bhtc", q, w_query)
    b = torch.einsum("bhtd,...hcd->bhtc" if w_key.dim() == 3 else "bhtd,cd->bhtc", k, w_key)
    b, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (b, v))
    u = u.expand(q.shape[1], u.shape[-1])
    x = ((a[:, :, :, None] + b[:, :, None]).tanh() * u[:, None, None]).sum(-1)
    masks = dict(masks)
    attn_mask = masks.pop("attn_mask", torch.ones((), dtype=torch.bool, device=q.device))
    keep = reference.visible_mask(q.shape[2], k.shape[2], device=q.device, **masks) & attn_mask
    x = x.masked_fill(~keep, -math.inf)
    blind = ~keep.expand(x.shape).any(-1)
    x = x.masked_fill(blind[..., None], 0.0)
    weights = x.softmax(-1).masked_fill(blind[..., None], 0.0)
    return weights @ v, x.logsumexp(-1).masked_fill(blind, -math.inf)


def additive_results(function: Any, tensors: list[Tensor], **arguments: Any) -> list[Tensor]:
    """o, lse and all gradients; do and dlse are equal in every dtype."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    o, lse = function(*tensors, **arguments)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (
        torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in (o, lse)
    )
    grads = torch.autograd.grad((o, lse), tensors, (do, dlse))
    return [o.detach(), lse.detach(), *grads]


def assert_additive(
    tensors: list[Tensor],
    backend: str | None,
    masks: dict[str, Any],
    formula: Callable[..., tuple[Tensor, Tensor]] = additive_formula,
    orders: int = RUNS,
) -> float:
    """Check o, lse and gradients of `additive_attention` by its formula.

    formula: another one, that knows more masks. Returns the worst error as a share of its budget,
    of so many `orders`, see `worst_naive`.
    """
    masks = to_device(masks, tensors[0].device)
    ours = additive_results(additive_attention, tensors, return_lse=True, backend=backend, **masks)
    ref = additive_results(formula, [x.double() for x in tensors], **masks)

    def plain() -> list[Tensor]:
        return additive_results(formula, tensors, **masks)

    return assert_all_near(ADDITIVE_RESULTS, ours, ref, plain, orders)
