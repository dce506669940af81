"""Choose the method of `context_attention`."""

from typing import NamedTuple

from torch import Tensor

from ..score_checks import COUNTING
from .pieces import Options
from .plan import ContextPlan
from .ranks import Ranks

METHODS = ("gather", "ring", "ulysses", "usp")


class MethodExplanation(NamedTuple):
    """The method of a call; `str()` formats it.

    Attributes:
        method: None if none does.
        reasons: by name, why a method cannot serve the call.
        because: why this method of those that can.
    """

    method: str | None
    reasons: dict[str, str]
    because: str = ""

    def __str__(self) -> str:
        chosen = f"method: {self.method}" + (f", {self.because}" if self.because else "")
        return "\n".join([chosen, *(f"  not {x}: {reason}" for x, reason in self.reasons.items())])


def explanation(
    q: Tensor, k: Tensor, ranks: Ranks, plan: ContextPlan, options: Options, method: str
) -> MethodExplanation:
    """Explain the choice for a checked call and a method or "auto"."""
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method must be one of auto, {', '.join(METHODS)}, got {method!r}")
    verdicts = {name: why_not(name, q, ranks, plan, options) for name in METHODS}
    reasons = {name: reason for name, reason in verdicts.items() if reason is not None}
    if method == "auto":
        return MethodExplanation(*_by_rule(reasons, k, ranks, plan, options))
    if method in reasons:
        return MethodExplanation(None, reasons)
    return MethodExplanation(method, reasons, "which was requested")


def _by_rule(
    reasons: dict[str, str], k: Tensor, ranks: Ranks, plan: ContextPlan, options: Options
) -> tuple[str | None, dict[str, str], str]:
    """The method of "auto", the reasons against others, and the reason for it.

    A ring that skips hops sends the fewest keys. Else ulysses: a rank sends its tokens once, and
    all ranks have equal work under every mask; but more ranks than K/V heads would repeat those.
    Else gather: few messages, which overlap with compute, for any heads. Two mesh dims have one
    method.
    """
    able = [name for name in METHODS if name not in reasons]
    hops = plan.hops(options) if "ring" in able else ranks.size
    H_k = k.shape[1]
    if 2 * hops < ranks.size:
        return "ring", reasons, f"whose keys go {hops} of {ranks.size - 1} hops"
    if "ulysses" in able and H_k % ranks.size == 0:
        return "ulysses", reasons, f"as {ranks.size} ranks divide {H_k} K/V heads"
    name = able[0] if able else None
    return name, reasons, "which takes any heads" if name == "gather" else ""


def choose(explained: MethodExplanation, method: str) -> str:
    """The explained method of a call with `method`.

    Raises:
        ValueError: the method cannot serve; the message names those that can.
    """
    if explained.method is not None:
        return explained.method
    if method == "auto":
        raise ValueError(f"no method can serve this call: {explained.reasons}")
    able = [name for name in METHODS if name not in explained.reasons]
    instead = f"; {' and '.join(able)} can" if able else ""
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
            return f"{name} depends on positions: the plan's block must be a multiple of 128"
    return None


def _degree(method: str, ranks: Ranks) -> int:
    """Number of ranks that share the heads."""
    return {"ulysses": ranks.size, "usp": ranks.degree}.get(method, 1)
