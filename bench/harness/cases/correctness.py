"""The error budget, checked for each implementation before timing.

The float64 oracle of a whole case is slow, so by default two heads are checked: the first key/value
head of the first batch row and the last of the last, with all their query heads. Every element of
their o and, with a backward, of their dq, dk and dv must keep the budget. All other results must be
finite. The oracle computes query rows in chunks, and sums dk and dv over the chunks in float32 or
wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...testing import assert_within_budget
from .case import Case
from .inputs import Inputs

# Most bytes of a score matrix of the oracle, which holds about ten.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**26}
# On a GPU a score matrix takes at most 1 / _PARTS of the free memory.
_PARTS = 20


@dataclass(frozen=True)
class Expected:
    """The oracle's results for the sampled heads: in float64 (exact) and the case's dtype (naive).

    Both map (batch row, key/value head) to o, or o, dq, dk, dv, of that head: [1, G, T_q, D] and
    [1, 1, T_k, D].
    """

    exact: dict[tuple[int, int], tuple[Tensor, ...]]
    naive: dict[tuple[int, int], tuple[Tensor, ...]]


def sampled_heads(case: Case) -> list[tuple[int, int]]:
    """The (batch row, key/value head) pairs that are checked."""
    return sorted({(0, 0), (case.B - 1, case.H_k - 1)})


def rows_at_once(case: Case, dtype: torch.dtype) -> int:
    """Query rows of one oracle chunk, for all query heads of a key/value head."""
    scores = case.H_q // case.H_k * case.T_k
    most = CHUNK_BYTES[case.device]
    if case.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        most = min(most, (free + kept) // _PARTS)
    return max(1, most // (scores * dtype.itemsize))


def all_heads(case: Case) -> list[tuple[int, int]]:
    """Every (batch row, key/value head) pair."""
    return [(b, h) for b in range(case.B) for h in range(case.H_k)]


def expect(case: Case, inputs: Inputs, heads: list[tuple[int, int]] | None = None) -> Expected:
    """The oracle's results for these heads; default: the sampled ones."""
    heads = sampled_heads(case) if heads is None else heads
    dtype = getattr(torch, case.dtype)
    return Expected(
        {head: _oracle(case, inputs, *head, torch.float64) for head in heads},
        {head: _oracle(case, inputs, *head, dtype) for head in heads},
    )


def check(case: Case, o: Tensor, gradients: tuple[Tensor, ...] | None, expected: Expected) -> None:
    """Check o [B, H_q, T_q, D] and dq, dk, dv, in a case with a backward, by the error budget."""
    names = ("o", "dq", "dk", "dv")
    results = (o, *(gradients or ()))
    G = case.H_q // case.H_k
    for name, x in zip(names, results, strict=False):
        assert x.isfinite().all(), f"{name} has NaN or inf"
        for (b, h), exact in expected.exact.items():
            first = h * G if name in ("o", "dq") else h
            count = G if name in ("o", "dq") else 1
            part = x[b : b + 1, first : first + count]
            i = names.index(name)
            assert_within_budget(name, part, exact[i], expected.naive[b, h][i])


def _oracle(case: Case, inputs: Inputs, b: int, h: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """o, or o, dq, dk, dv, of one key/value head and its query heads, in chunks of query rows."""
    G = case.H_q // case.H_k
    row, queries = slice(b, b + 1), slice(h * G, (h + 1) * G)
    q, do = (x[row, queries].detach().to(dtype) for x in (inputs.q, inputs.do))
    k, v = (x[row, h : h + 1].detach().to(dtype) for x in (inputs.k, inputs.v))
    padding: dict[str, Any] = {
        name: None if x is None else x[row] for name, x in inputs.padding().items()
    }
    needs_grad = case.direction != "forward"
    wide = torch.promote_types(dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    outputs, dqs = [], []
    rows = rows_at_once(case, dtype)
    for first in range(0, case.T_q, rows):
        option: dict[str, Any] = {
            name: _rows(x, queries, first, rows) for name, x in inputs.option.items()
        }
        leaves = [
            x.detach().requires_grad_(needs_grad) for x in (q[:, :, first:][:, :, :rows], k, v)
        ]
        o = reference.attention(
            *leaves,
            causal=case.causal,
            window=case.window,
            query_offset=case.T_k - case.T_q + first,
            **{**padding, **option},
        )
        assert isinstance(o, Tensor)
        outputs.append(o.detach())
        if needs_grad:
            dq_part, dk_part, dv_part = torch.autograd.grad(
                o, leaves, do[:, :, first : first + rows]
            )
            dqs.append(dq_part)
            dk += dk_part
            dv += dv_part
    o = torch.cat(outputs, 2)
    return (o, torch.cat(dqs, 2), dk.to(dtype), dv.to(dtype)) if needs_grad else (o,)


def _rows(option: Tensor, heads: slice, first: int, rows: int) -> Tensor:
    """Slice an option's tensor of `Inputs` by heads and query rows."""
    if option.dim() <= 2:
        return option[heads]
    part = option[:, :, first : first + rows]
    return part if part.shape[1] == 1 else part[:, heads]
