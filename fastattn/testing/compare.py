"""Check outputs, lse and all gradients of attention against the oracle."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..options import LEARNED
from .budget import PastBudget, assert_all_within_budget
from .orders import RUNS, worst_naive

NAMES = ("o", "lse", "dq", "dk", "dv")
# Differentiable arguments beside q, k and v. A float attn_mask is a bias.
DIFFERENTIABLE = ("attn_mask", *LEARNED, "weight", "u", "w_query", "w_key")


def assert_matches_reference(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: Any,
    clean: tuple[Tensor, Tensor, Tensor] | None = None,
    oracle: Callable[..., Any] = reference.attention,
    backward: bool = True,
    orders: int = RUNS,
    **arguments: Any,
) -> float:
    """Check o, lse, dq, dk, dv and the gradients of float options against the oracle.

    Args:
        attention: called as attention(q, k, v, *positional, return_lse=True, **arguments).
        q, k, v: leaf tensors that require grad, drawn in the tested dtype.
        clean: q, k, v for the oracle, if the tested ones hold NaN in padding.
        oracle: `reference.attention_varlen` for packed sequences, whose offsets are `positional`.
        backward: check gradients too.
        orders: number of orders of summation, see `worst_naive`.
        arguments: options of both. Gradients of options in DIFFERENTIABLE are always compared too.

    Returns:
        The worst error as a share of its budget.

    Raises:
        AssertionError: a result that is not finite, or past its budget.
    """
    run = results if backward else _outputs
    ours = run(attention, q, k, v, *positional, **arguments)
    originals = clean if clean is not None else (q, k, v)
    learned = learned_names(arguments)
    wide = {name: x.double() if name in learned else x for name, x in arguments.items()}
    ref = run(oracle, *(x.detach().double() for x in originals), *positional, **wide)

    def naive() -> tuple[Tensor, ...]:
        return run(oracle, *(x.detach() for x in originals), *positional, **arguments)

    names = (*NAMES, *(f"d{name}" for name in learned))[: None if backward else 2]
    return assert_all_near(names, ours, ref, naive, orders)


def assert_all_near(
    names: Sequence[str],
    actual: Sequence[Tensor],
    exact: Sequence[Tensor],
    naive: Callable[[], Sequence[Tensor]],
    orders: int = RUNS,
) -> float:
    """Check results by `assert_all_within_budget`: first one order of summation, then all.

    More orders only enlarge the budget.
    """
    state = torch.get_rng_state()
    with contextlib.suppress(PastBudget):
        return assert_all_within_budget(names, actual, exact, naive())
    torch.set_rng_state(state)
    return assert_all_within_budget(names, actual, exact, worst_naive(exact, naive, orders))


def _outputs(
    attention: Callable[..., Any], *inputs: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    """o and lse of a call outside autograd."""
    with torch.no_grad():
        o, lse = attention(*inputs, return_lse=True, **arguments)
    return o, lse


def results(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: Any,
    **arguments: Any,
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv and gradients of float options; do and dlse are alike in every dtype."""
    names = learned_names(arguments)
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = attention(q, k, v, *positional, return_lse=True, **{**arguments, **leaves})
    generator = torch.Generator().manual_seed(1)
    # bf16 values, as they are exact in every dtype.
    do, dlse = (
        torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in (o, lse)
    )
    grads = torch.autograd.grad((o, lse), (q, k, v, *leaves.values()), (do, dlse))
    return (o.detach(), lse.detach(), *grads)


def learned_names(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Names of the differentiable arguments, in the order of DIFFERENTIABLE."""
    tensors = (name for name in DIFFERENTIABLE if arguments.get(name) is not None)
    return tuple(name for name in tensors if arguments[name].is_floating_point())
