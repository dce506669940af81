"""Operator of key block scores, without gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ..call import operator


def _scored(arguments: Mapping[str, Any]) -> int:
    q, k = arguments["q"], arguments["k"]
    rows = arguments["row_end"] - arguments["row_start"]
    pairs = q.shape[0] * q.shape[1] * rows * k.shape[2]
    return int(2 * pairs * q.shape[3] * (arguments["pool"] // arguments["stride"]))


@operator(_scored)
def block_scores(
    q: Tensor, k: Tensor, lse: Tensor | None, H_s: int, per_block: int, pool: int, stride: int,
    count: int, row_start: int, row_end: int, offset: int, scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Score key blocks; see `kernels.selected.choose.launch_block_scores`."""
    return kernels.selected_choose.launch_block_scores(
        q, k, lse, H_s, per_block, (pool, stride), count, (row_start, row_end), offset, scale,
        causal,
    )  # fmt: skip


@block_scores.op.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor | None, H_s: int, per_block: int, pool: int, stride: int,
    count: int, row_start: int, row_end: int, *_: object,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], H_s, row_end - row_start, count, dtype=torch.float32)
