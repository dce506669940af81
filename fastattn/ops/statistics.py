"""Statistics of attention weights by their kernels; nothing here has a gradient."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..options import Options
from . import flops
from .call import Operator


def _computed(times: int) -> flops.Formula:
    """The scores, computed so often, and once more where lse is not given."""

    def count(given: Mapping[str, Any]) -> int:
        return flops.attended(times + (given["lse"] is None), 0)(given)

    return count


@partial(Operator, flops=_computed(2))
def attention_statistics(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, weight received, largest weights and their keys.

    Last dims are contiguous and whole multiples of 16 bytes; lse is fp32 and contiguous.
    """
    launch = kernels.statistics
    if lse is None:
        lse = launch.launch_lse(q, k, options)
    entropy, largest, positions = launch.launch_row_statistics(q, k, lse, options, top)
    return entropy, launch.launch_received(q, k, lse, options), largest, positions


@attention_statistics.op.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor | None, top: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H_q, T_q, _D = q.shape
    entropy = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    received = q.new_empty(B, H_q, k.shape[2], dtype=torch.float32)
    largest = q.new_empty(B, H_q, T_q, top, dtype=torch.float32)
    return entropy, received, largest, q.new_empty(B, H_q, T_q, top, dtype=torch.int64)


@partial(Operator, flops=_computed(1))
def attention_weights(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> Tensor:
    """All weights, fp32 [B, H_q, T_q, T_k]; arguments as for `attention_statistics`."""
    if lse is None:
        lse = kernels.statistics.launch_lse(q, k, options)
    return kernels.statistics.launch_weights(q, k, lse, options)


@attention_weights.op.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32)
