"""Statistics of attention weights: their formula on torch, their kernels, and operators of these.

Nothing here has a gradient.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..options import Options
from ..torch_backend import formula
from ..torch_backend.query_chunks import chunks
from . import attention, schema

# Scores that the formula holds at once: 256 MiB in fp32.
_SCORES = 2**26


@cache
def _kernels() -> ModuleType:
    attention._kernels()  # which repairs the interpreter, where there is one
    from ..kernels import statistics

    return statistics


def _statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with attention._device_of(q):
        if lse is None:
            lse = _kernels().launch_lse(q, k, options)
        entropy, largest, positions = _kernels().launch_row_statistics(q, k, lse, options, top)
        return entropy, _kernels().launch_received(q, k, lse, options), largest, positions


def _weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    with attention._device_of(q):
        if lse is None:
            lse = _kernels().launch_lse(q, k, options)
        found: Tensor = _kernels().launch_weights(q, k, lse, options)
        return found


_INPUTS = "Tensor q, Tensor k, Tensor? lse"
attention_statistics = schema.operator(
    "attention_statistics", _statistics, f"{_INPUTS}, int top", "(Tensor, Tensor, Tensor, Tensor)"
)
attention_weights = schema.operator("attention_weights", _weights, _INPUTS, "Tensor")


@attention_statistics.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    entropy = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    received = q.new_empty(B, H_q, k.shape[2], dtype=torch.float32)
    largest = q.new_empty(B, H_q, T_q, top, dtype=torch.float32)
    return entropy, received, largest, q.new_empty(B, H_q, T_q, top, dtype=torch.int64)


@attention_weights.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32)


def statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, weight received, largest weights and their keys, from the kernels.

    Last dims are contiguous and whole multiples of 16 bytes; lse is fp32 and contiguous.
    """
    options = attention._in_order(options)
    if attention._may_be_traced(q):
        found: tuple[Tensor, ...] = attention_statistics(q, k, lse, top, *schema.flat(options))
        entropy, received, largest, positions = found
        return entropy, received, largest, positions
    return _statistics(q, k, lse, top, options)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    """All weights, fp32 [B, H_q, T_q, T_k], from the kernels; arguments as for `statistics`."""
    options = attention._in_order(options)
    if attention._may_be_traced(q):
        traced: Tensor = attention_weights(q, k, lse, *schema.flat(options))
        return traced
    return _weights(q, k, lse, options)


def torch_statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`statistics` by the formula, for any dtype; holds the scores of some queries at a time."""
    B, H_q, T_q, _ = q.shape
    T_k = k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    received = torch.zeros(B, H_q, T_k, dtype=wide, device=q.device)
    entropies, largest, positions = [], [], []
    for rows, own in chunks(options, T_q, B * H_q * T_k, _SCORES):
        x, p, own_lse = _torch_weights(
            q[:, :, rows], k, None if lse is None else lse[:, :, rows], own
        )
        entropy = _surprise(p, x, own_lse[..., None]).sum(-1)
        if options.sinks is not None:
            sink = options.sinks.to(wide)[:, None]
            entropy = entropy + _surprise((sink - own_lse).exp(), sink, own_lse)
        entropies.append(entropy)
        received += p.sum(-2)
        # Ordered by score, since small weights round to 0; a stable sort keeps the lowest position.
        order = x.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        seen = x.gather(-1, order) > float("-inf")
        missing = (0, top - order.shape[-1])
        found = torch.where(seen, p.gather(-1, order), 0.0)
        largest.append(torch.nn.functional.pad(found, missing))
        places = torch.where(seen, order, -1)
        positions.append(torch.nn.functional.pad(places, missing, value=-1))
    return torch.cat(entropies, 2), received, torch.cat(largest, 2), torch.cat(positions, 2)


def torch_weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    """`weights` by the formula, for any dtype, in fp32 or wider."""
    return _torch_weights(q, k, lse, options)[1]


def _torch_weights(
    q: Tensor, k: Tensor, lse: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and lse in fp32 or wider."""
    if formula.autocasting(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return _torch_weights(q, k, lse, options)
    x = formula.scores(q, k, options)
    if lse is None:
        p, lse = formula.normalised(x, options.sinks)
    else:
        p = torch.exp(x - lse[..., None])
    # Keys that are not seen have none, in rows of NaN too.
    return x, torch.where(x == float("-inf"), 0.0, p), lse


def _surprise(p: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """-p ln p of weights p = exp(x - lse); 0 for p = 0."""
    return torch.where(p == 0, 0.0, p * (lse - x))
