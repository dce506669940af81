"""Attention of a rank's queries to a part of the keys, and that part's share of the gradients.

A part is one call or several, as `pieces.pairs` cuts it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional.block import attention_block_backward, attention_block_forward
from ..functional.merge import merge
from .pieces import Options, Run, blank, of_pair, pairs


class Whole(NamedTuple):
    """Tensors over all keys that the parts' gradients are made from: do, dlse, o and lse."""

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> "Whole":
        """Slice the queries."""
        return Whole(*(None if x is None else x[:, :, rows] for x in self))  # type: ignore[arg-type]

    def heads(self, heads: slice) -> "Whole":
        """Slice the heads."""
        return Whole(*(None if x is None else x[:, heads] for x in self))  # type: ignore[arg-type]


class Gradients(NamedTuple):
    """fp32 or wider, of q, k and v, and of the learned options that are given but sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    learned: list[Tensor]


def wide(x: Tensor) -> Tensor:
    """x in fp32 or wider."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which parts of x's dtype are added up."""
    return torch.promote_types(x.dtype, torch.float32)


def zeros_for(*tensors: Tensor) -> list[Tensor]:
    """Zeros in the tensors' shapes, fp32 or wider, for `part_backward` to add gradients to."""
    return [torch.zeros_like(wide(x.detach())) for x in tensors]


def part_forward(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run],
    k_runs: Sequence[Run], options: Options,
) -> None:  # fmt: skip
    """Merges attention to these keys into o and lse, in place.

    Args:
        o, lse: of the keys so far, o in fp32 or wider; see `blank`.
        q: [B, H_q, T_q, D], the queries of q_runs behind one another.
        k, v: [B, H_k, T_k, D or D_v], the keys of k_runs behind one another.
    """
    for pair in pairs(q_runs, k_runs, options):
        part = attention_block_forward(
            q[:, :, pair.rows],
            k[:, :, pair.keys],
            v[:, :, pair.keys],
            out_dtype=o.dtype,
            **of_pair(options, pair, q.device),
        )
        seen = o[:, :, pair.rows], lse[:, :, pair.rows]
        o[:, :, pair.rows], lse[:, :, pair.rows] = merge(*seen, *part)


def whole_forward(
    q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run], options: Options
) -> tuple[Tensor, Tensor]:
    """o in q's dtype, and lse: attention to all keys of the sequence, in its order."""
    o, lse = blank(q, v, q.dtype)
    for pair in pairs(q_runs, [(0, k.shape[2])], options):
        o[:, :, pair.rows], lse[:, :, pair.rows] = attention_block_forward(
            q[:, :, pair.rows], k, v, **of_pair(options, pair, q.device)
        )
    return o, lse


def part_backward(
    total: Gradients, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run],
    k_runs: Sequence[Run], options: Options, leaves: Sequence[Tensor], whole: Whole,
) -> None:  # fmt: skip
    """Adds the share of these keys in the gradients to a total, in place.

    Args:
        q, k, v, q_runs, k_runs: as of `part_forward`.
        options: without sinks. leaves: what their tensors that have gradients are made from.
    """
    for pair in pairs(q_runs, k_runs, options):
        with torch.enable_grad():
            given = of_pair(options, pair, q.device)
        do, dlse, o, lse = whole.rows(pair.rows)
        part = attention_block_backward(
            do,
            q[:, :, pair.rows],
            k[:, :, pair.keys],
            v[:, :, pair.keys],
            o,
            lse,
            dlse=dlse,
            out_dtype=total.q.dtype,
            **given,
        )
        total.q[:, :, pair.rows] += part.dq
        total.k[:, :, pair.keys] += part.dk
        total.v[:, :, pair.keys] += part.dv
        of_pieces = [given[name] for name in part.of_options], [*part.of_options.values()]
        if leaves:
            grads = torch.autograd.grad(of_pieces[0], leaves, of_pieces[1])
            for learned, grad in zip(total.learned, grads, strict=True):
                learned += grad


def add_sinks(o: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse with one more key for every query of a head, whose value is 0."""
    if sinks is None:
        return o, lse
    score = sinks.to(lse.dtype)[:, None].expand_as(lse)
    return merge(o, lse, torch.zeros_like(o), score.contiguous())


def sinks_gradient(sinks: Tensor, whole: Whole) -> Tensor:
    """[H_q]: a sink is one more key with value 0: its ds is its weight times (0 - delta)."""
    delta = (wide(whole.do) * whole.o).sum(-1)
    delta = delta if whole.dlse is None else delta - whole.dlse
    weight = torch.exp(sinks.to(delta.dtype)[:, None] - whole.lse)
    return -(weight * delta).sum((0, 2))
