"""Refuse calls on one rank's tokens of a sequence that is spread over ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F

# Serves `attention` in its place while a sequence is spread, see `ContextParallel`.
attend: Callable[..., Any] | None = None
TORCH_ATTENTION = F.scaled_dot_product_attention
_TORCH_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"


@contextmanager
def attending(function: Callable[..., Any] | None) -> Iterator[None]:
    """Serve `attention` by a function, and refuse other calls; None: compute on a rank's tokens."""
    global attend
    before, attend = attend, function
    try:
        yield
    finally:
        attend = before


def why_partial() -> str | None:
    """Reason that a call on a rank's tokens would see a part of their sequence, or None."""
    if attend is not None:
        return (
            "under ContextParallel, where it would see the tokens of one rank: `attention`, "
            "GQAttention and torch's scaled_dot_product_attention see those of all"
        )
    torch_attention = F.scaled_dot_product_attention
    if torch_attention is TORCH_ATTENTION:
        return None
    if str(getattr(torch_attention, "__module__", None)).startswith(_TORCH_CONTEXT_PARALLEL):
        return (
            "under torch's context_parallel, which spreads scaled_dot_product_attention alone: "
            "fastattn.models.context_parallel.ContextParallel spreads both"
        )
    return None


def refuse(call: str) -> None:
    """Raise a TypeError if a call would see a part of its sequence."""
    if (reason := why_partial()) is not None:
        raise TypeError(f"{call} is not supported {reason}")
