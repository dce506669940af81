"""A rank's part of a global batch and its dropout, independent of the split."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...parallel import ContextPlan
from ...parallel.shard import own_tokens
from ..data.rows import IGNORED
from ..tasks.task import Batch


class Part(NamedTuple):
    """Part of a batch that one rank computes: its rows and tokens.

    targets: number of targets in the global batch, which divides the loss; None = the part is the
    whole batch.
    """

    batch: Batch
    targets: int | None


class BatchSlice(NamedTuple):
    """Rows and tokens of a global batch of B rows that a rank holds.

    rows: int64 [b], rising; numbers from B on are padding. plan: assignment of tokens to ranks;
    None = each holds all tokens of its rows. rank: of this process in the plan.
    """

    rows: Tensor
    B: int
    plan: ContextPlan | None = None
    rank: int = 0

    def of(self, x: Tensor) -> Tensor:
        """This rank's part of x [B, T, ...] or, without a plan, [B, ...]; 0 in padding."""
        rows = x.index_select(0, self.rows.clamp(max=self.B - 1).to(x.device))
        return rows if self.plan is None else own_tokens(rows, 1, self.plan, self.rank)

    def batch(self, batch: Batch) -> Batch:
        """This rank's part of a batch (with all rows or its own); padding has no target."""
        if batch.whole_rows is not None:
            count = len(batch.targets)
            own = self._replace(rows=torch.arange(count, device="cpu"), B=count)
            return own.batch(dataclasses.replace(batch, whole_rows=None))
        targets = self.of(batch.targets - IGNORED) + IGNORED
        targets[self.rows >= self.B] = IGNORED
        rows = self._replace(plan=None)
        return Batch(
            tuple(map(self.of, batch.inputs)),
            targets,
            {name: rows.of(lengths) for name, lengths in batch.lengths.items()},
            None if batch.documents is None else self.of(batch.documents + 1) - 1,
        )


def batch_slice(
    B: int, part: int, parts: int, plan: ContextPlan | None = None, rank: int = 0
) -> BatchSlice:
    """Part number `part` of B rows; parts have equal sizes, the last ones padded."""
    each = -(-B // parts)
    return BatchSlice(torch.arange(part * each, (part + 1) * each, device="cpu"), B, plan, rank)


def plan_rows(
    T: int, ranks: int, *, window: int | None = None, documents: Tensor | None = None
) -> ContextPlan:
    """`ContextPlan.make` for causal rows."""
    return ContextPlan.make(T, ranks, causal=True, window=window, documents=documents)


class SplitDropout(TorchFunctionMode):
    """Makes `F.dropout` of a rank's part [b, t, ...] a slice of the whole batch's dropout.

    Every rank draws the mask of the whole batch from torch's generator, whose state is equal on all
    ranks, and takes its own rows and tokens. One process would draw the same mask. Dropout of
    attention weights counts positions instead, inside the kernels.

    Backward passes that recompute a forward must run in this mode too.
    """

    def __init__(self, rows: BatchSlice) -> None:
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = self._dropout if func is F.dropout else func
        return function(*args, **(kwargs or {}))

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return x
        rows = self._rows
        T = x.shape[1] if rows.plan is None else rows.plan.T
        # torch.dropout, as in code traced by torch 2.13 a mode would call itself through F.dropout.
        scales = torch.dropout(x.new_ones(rows.B, T, *x.shape[2:]), p, True)
        return x * rows.of(scales)
