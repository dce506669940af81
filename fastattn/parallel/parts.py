"""Attention of a rank's queries to a part of the keys, and the part's gradients.

A part takes one or several calls, see `pieces.pairs`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional.block import attention_block_backward, attention_block_forward
from ..functional.merge import merge
from .pieces import Options, Run, blank, of_pair, pairs


class Whole(NamedTuple):
    """Tensors over all keys for the parts' gradients: do, dlse, o and lse."""

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> "Whole":
        """Slice the queries."""
        return Whole(*(None if x is None else x[:, :, rows] for x in self))  # type: ignore[arg-type]

    @property
    def delta(self) -> Tensor:
        """do.o - dlse."""
        delta = (wide(self.do) * self.o).sum(-1)
        return delta if self.dlse is None else delta - self.dlse

    def heads(self, heads: slice) -> "Whole":
        """Slice the heads."""
        return Whole(*(None if x is None else x[:, heads] for x in self))  # type: ignore[arg-type]


class Gradients(NamedTuple):
    """Gradients in fp32 or wider of q, k and v, and of given learned options except sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    learned: list[Tensor]


def wide(x: Tensor) -> Tensor:
    """x in fp32 or wider."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype of sums of parts in x's dtype."""
    return torch.promote_types(x.dtype, torch.float32)


def zeros_for(*tensors: Tensor) -> list[Tensor]:
    """Zeros in the tensors' shapes, fp32 or wider, for sums in `part_backward`."""
    return [torch.zeros_like(wide(x.detach())) for x in tensors]


def part_forward(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run],
    k_runs: Sequence[Run], options: Options,
) -> None:  # fmt: skip
    """Merge attention to these keys into o, fp32 or wider, and lse, in place; see `blank`.

    q: [B, H_q, T_q, D], the concatenated queries of q_runs; k, v: the keys of k_runs, likewise.
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
    """Attention to all keys of the sequence, in order: o in q's dtype, and lse."""
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
    """Add these keys' share of the gradients to a total, in place; see `part_forward`.

    options: without sinks. leaves: sources of their tensors with gradients.
    """
    for pair in pairs(q_runs, k_runs, options):
        with torch.enable_grad():
            pair_options = of_pair(options, pair, q.device)
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
            **pair_options,
        )
        total.q[:, :, pair.rows] += part.dq
        total.k[:, :, pair.keys] += part.dk
        total.v[:, :, pair.keys] += part.dv
        if leaves:
            mods = part.of_options.pop("mod_tensors", ())
            pieces = [pair_options[name] for name in part.of_options]
            pieces += [x for x in pair_options.get("mod_tensors", ()) if x.requires_grad]
            found = [*part.of_options.values(), *(x for x in mods if x is not None)]
            grads = torch.autograd.grad(pieces, leaves, found)
            for learned, grad in zip(total.learned, grads, strict=True):
                learned += grad
