"""Choose the method of `context_attention`."""

import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..score_checks import COUNTING
from .cost import METHODS, Shape, cost
from .pieces import Options
from .plan import ContextPlan, visible_keys
from .ranks import Ranks


class MethodExplanation(NamedTuple):
    """The method of a call; `str()` formats it.

    Attributes:
        method: None if none does.
        reasons: by name, why a method cannot serve the call.
        seconds: modelled (not measured) seconds of forward and backward by name of the methods that
            serve, from `cost`.
    """

    method: str | None
    reasons: dict[str, str]
    seconds: dict[str, float]

    def __str__(self) -> str:
        able = [f"  {name}: {x * 1e3:.3g} ms, modelled" for name, x in self.seconds.items()]
        unable = [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"method: {self.method}", *able, *unable])


def explanation(
    q: Tensor, k: Tensor, ranks: Ranks, plan: ContextPlan, options: Options, method: str
) -> MethodExplanation:
    """Explain the choice for a checked call and a method or "auto"."""
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method must be one of auto, {', '.join(METHODS)}, got {method!r}")
    verdicts = {name: why_not(name, q, ranks, plan, options) for name in METHODS}
    reasons = {name: reason for name, reason in verdicts.items() if reason is not None}
    B, H_q, _, D = q.shape
    share = _share(plan.T, options)
    if "documents" in options and plan.documents is not None:
        share = min(share, plan.share)
    shape = Shape(plan.T, H_q, k.shape[1], D, B, share)
    rates = plan.rates._replace(node=_gpus_of_a_node(ranks.size))
    seconds = {}
    for name in METHODS:
        if name not in reasons:
            imbalance, around = plan.around(_degree(name, ranks), options)
            of_method = shape._replace(imbalance=imbalance, around=around)
            seconds[name] = cost(name, of_method, ranks.size, rates, ranks.degree).seconds
    if method == "auto":
        return MethodExplanation(
            min(seconds, key=seconds.__getitem__, default=None), reasons, seconds
        )
    return MethodExplanation(None if method in reasons else method, reasons, seconds)


def choose(explained: MethodExplanation, method: str) -> str:
    """The explained method of a call with `method`.

    Raises:
        ValueError: the method cannot serve; the message names those that can.
    """
    if explained.method is not None:
        return explained.method
    if method == "auto":
        raise ValueError(f"no method can serve this call: {explained.reasons}")
    instead = f"; {' and '.join(explained.seconds)} can" if explained.seconds else ""
    reason = explained.reasons[method]
    raise ValueError(f"method {method!r} cannot serve this call: {reason}{instead}")


def why_not(
    method: str, q: Tensor, ranks: Ranks, plan: ContextPlan, options: Options
) -> str | None:
    """Reason that a method cannot serve a call, or None."""
    two = ranks.inner is not None
    if (method == "usp") != two:
        wanted = "two dimensions (ring, heads)" if method == "usp" else "one dimension"
        return f"it takes a mesh of {wanted}"
    degree = _degree(method, ranks)
    if q.shape[1] % degree:
        return f"its {degree} ranks do not divide the {q.shape[1]} heads of q"
    for name in COUNTING:
        # Gathered keys are in order, as are the tokens of ranks that hold all of them.
        in_order = method == "ulysses" or (method == "gather" and name != "dropout")
        if name in options and not in_order and not plan.merged(degree).aligned:
            return f"{name} goes by positions: the plan's block must be a multiple of 128"
    return None


def _degree(method: str, ranks: Ranks) -> int:
    """Number of ranks that share the heads."""
    return {"ulysses": ranks.size, "usp": ranks.degree}.get(method, 1)


def _share(T: int, options: Options) -> float:
    """Share of (query, key) pairs that causal and window leave visible."""
    if options.get("stride") is not None:
        return 0.5 if options.get("causal") else 1.0
    return _share_of_window(T, options.get("causal", False), options.get("window"))


@lru_cache(maxsize=64)
def _share_of_window(T: int, causal: bool, window: Any) -> float:
    return int(visible_keys(T, causal=causal, window=window).sum()) / T**2


def _gpus_of_a_node(ranks: int) -> int:
    """GPUs per node: torchrun's number, or those visible to this process; equal on all nodes."""
    gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count()
    return min(gpus, ranks) or ranks
