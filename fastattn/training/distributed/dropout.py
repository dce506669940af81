"""Dropout of embeddings and hidden states that drops the same elements however ranks are split.

Every rank draws the mask of the whole global batch from torch's generator, which is in the same
state on every rank, and takes its own rows and tokens of it. That is what one process draws; it
costs each rank the random numbers of all. Dropout of attention weights counts positions instead,
inside the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .batches import Place


class SplitDropout(TorchFunctionMode):
    """In force, `F.dropout` of a rank's part [b, t, ...] drops what it would of the whole.

    Backward passes that compute a forward again have to be in it too.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return x
        place = self._place
        T = x.shape[1] if place.plan is None else place.plan.T
        # What F.dropout calls, by its name: in code that torch 2.13 traces, a mode calls itself.
        scales = torch.dropout(x.new_ones(place.B, T, *x.shape[2:]), p, True)
        return x * place.of(scales)
