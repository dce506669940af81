"""The error budget, checked for each implementation before timing.

The float64 oracle of a whole case is slow, so by default two heads are checked: the first key/value
head of the first batch row and the last of the last, with all their query heads. Every element of
their o and, with a backward, of their dq, dk and dv must keep the budget. All other results must be
finite. The oracle computes query rows in chunks, and sums dk and dv over the chunks in float32 or
wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...testing import assert_within_budget
from ...torch_backend.dropout import keep_mask
from .case import Case
from .inputs import Inputs

# Most bytes of a score matrix of the oracle, which holds about ten.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**26}
# On a GPU a score matrix takes at most 1 / _PARTS of the free memory.
_PARTS = 20


# Results of a head: o, or o, dq, dk, dv; [1, G, T_q, D] and [1, 1, T_k, D].
Results = tuple[Tensor, ...]
# The oracle's results in float64 and in the case's dtype, by (batch row, key/value head).
Expected = dict[tuple[int, int], tuple[Results, Results]]


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
    exact, naive = torch.float64, getattr(torch, case.dtype)
    return {
        head: (_oracle(case, inputs, *head, exact), _oracle(case, inputs, *head, naive))
        for head in heads
    }


def check(case: Case, o: Tensor, gradients: tuple[Tensor, ...] | None, expected: Expected) -> None:
    """Check o [B, H_q, T_q, D] and dq, dk, dv, in a case with a backward, by the error budget."""
    for i, x in enumerate((o, *(gradients or ()))):
        name = ("o", "dq", "dk", "dv")[i]
        assert x.isfinite().all(), f"{name} has NaN or inf"
        count = case.H_q // case.H_k if name in ("o", "dq") else 1
        for (b, h), (exact, naive) in expected.items():
            part = x[b : b + 1, h * count : (h + 1) * count]
            assert_within_budget(name, part, exact[i], naive[i])


def _oracle(case: Case, inputs: Inputs, b: int, h: int, dtype: torch.dtype) -> Results:
    """Results of one key/value head and its query heads, in chunks of query rows."""
    G = case.H_q // case.H_k
    row, queries = slice(b, b + 1), slice(h * G, (h + 1) * G)
    q, do = (x[row, queries].detach().to(dtype) for x in (inputs.q, inputs.do))
    k, v = (x[row, h : h + 1].detach().to(dtype) for x in (inputs.k, inputs.v))
    options: dict[str, Any] = {"causal": case.causal, "window": case.window}
    options |= {name: None if x is None else x[row] for name, x in inputs.padding().items()}
    needs_grad = case.direction != "forward"
    wide = torch.promote_types(dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    outputs, dqs = [], []
    rows = rows_at_once(case, dtype)
    for first in range(0, case.T_q, rows):
        chunk = slice(first, min(first + rows, case.T_q))
        options |= _of_part(case, inputs.option, b, queries, chunk)
        leaves = [x.detach().requires_grad_(needs_grad) for x in (q[:, :, chunk], k, v)]
        o = reference.attention(*leaves, query_offset=case.T_k - case.T_q + first, **options)
        assert isinstance(o, Tensor)
        outputs.append(o.detach())
        if needs_grad:
            dq_part, dk_part, dv_part = torch.autograd.grad(o, leaves, do[:, :, chunk])
            dqs.append(dq_part)
            dk += dk_part
            dv += dv_part
    o = torch.cat(outputs, 2)
    return (o, torch.cat(dqs, 2), dk.to(dtype), dv.to(dtype)) if needs_grad else (o,)


def _of_part(
    case: Case, option: dict[str, Any], b: int, heads: slice, chunk: slice
) -> dict[str, Any]:
    """An option of `Inputs` for a batch row, its heads and some of its query rows."""
    # Of functions and dropout.
    part: dict[str, Any] = {"first_row": b, "heads": (heads.start, case.H_q)}
    for name, x in option.items():
        if name == "documents":
            part[name] = (x[b : b + 1, chunk], x[b : b + 1])
        elif name == "dropout":
            part[name], seed = x, option["dropout_seed"]
            keys = torch.arange(case.T_k, device=seed.device, dtype=torch.int32)[None]
            sizes = (1, heads.stop - heads.start, chunk.stop - chunk.start, case.T_k)
            how: dict[str, Any] = {"first_row": b, "heads": part["heads"]}
            how["positions"] = (keys[:, chunk], keys)
            part["dropout_keep"] = keep_mask(seed, x, *sizes, **how)
        elif isinstance(x, Tensor) and name != "dropout_seed":
            part[name] = _rows(x, heads, chunk)
        else:
            part[name] = x
    return part


def _rows(option: Tensor, heads: slice, chunk: slice) -> Tensor:
    """Slice an option's tensor by heads and query rows."""
    if option.dim() <= 2:
        return option[heads]
    part = option[:, :, chunk]
    return part if part.shape[1] == 1 else part[:, heads]
