"""Check functions with flash-attn's arguments and layout against the oracle."""

from __future__ import annotations

from typing import Any

import torch
from oracles import assert_by_oracle
from torch import Tensor

from fastattn import reference
from fastattn.testing.inputs import to_device

_SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
# flash-attn's arguments for 4 query heads, and the same call's options of `reference.attention`.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "causal-window": ({"causal": True, "window_size": (3, 0)}, {"causal": True, "window": (3, 0)}),
    "alibi": ({"alibi_slopes": _SLOPES}, {"alibi_slopes": _SLOPES}),
}


def case(name: str, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One of CASES on a device: flash-attn's arguments, and the oracle's options."""
    theirs, ours = CASES[name]
    return to_device(theirs, device), to_device(ours, device)


def offsets(lengths: tuple[int, ...], device: str) -> Tensor:
    """cu_seqlens, int32, of sequences of these lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    """o [B, T_q, H_q, D_v] and lse [B, H_q, T_q] of the reference, computed in dtype."""
    wide = {name: x.to(dtype) if name == "sinks" else x for name, x in options.items()}
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    o, lse = reference.attention(q, k, v, return_lse=True, **wide)
    return o.transpose(1, 2), lse


def check(actual: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Check a function's result, o or (o, lse, ...), by the error budget; o is contiguous."""
    results = actual[:2] if isinstance(actual, tuple) else (actual,)
    assert results[0].is_contiguous()
    n = len(results)
    assert_by_oracle(results, lambda dtype: oracle(q, k, v, dtype, **options)[:n], q.dtype)


def check_parts(
    actual: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: list[tuple[slice, slice]],
    **options: Any,
) -> None:
    """Check packed sequences one by one; parts: slices of their queries and keys."""
    o, lse = actual[:2]
    for rows, keys in parts:
        part = (o[None, rows].contiguous(), lse[None, :, rows])
        check(part, q[None, rows], k[None, keys], v[None, keys], **options)
