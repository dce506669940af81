"""Error budget: the project's only tolerance.

    max|x - ref|  <=  2 * max|naive - ref|  +  eps(dtype) * max|ref|  +  64 * eps(fp32)

ref is the oracle in fp64, naive the oracle in the tested dtype, on the same inputs, drawn in that
dtype. The terms are the error of the naive formula, one rounding of the output, and a floor for
gradients that cancel to zero.

A single naive run can be exact by luck, and differs between machines. So naive is the worst of
several runs, by `orders.worst_naive`.
"""

from collections.abc import Iterable
from itertools import starmap

import torch
from torch import Tensor


def error_budget(ref: Tensor, naive: Tensor, dtype: torch.dtype) -> float:
    """Compute the largest allowed error of a result in `dtype`; ignores infinite entries of ref."""
    ref = ref.double()
    finite = ref.isfinite()
    if not finite.any():
        return 64 * torch.finfo(torch.float32).eps
    formula = (naive.double() - ref)[finite].abs().max()
    assert formula.isfinite(), "the naive result is not finite, so it gives no budget"
    rounding = torch.finfo(dtype).eps * ref[finite].abs().max()
    return float(2 * formula + rounding + 64 * torch.finfo(torch.float32).eps)


class PastBudget(AssertionError):
    """Error: a result exceeds its budget."""

    def __init__(self, message: str, share: float) -> None:
        super().__init__(message)
        self.share = share


def assert_within_budget(name: str, x: Tensor, ref: Tensor, naive: Tensor) -> float:
    """Check that x is infinite exactly where ref is, and within the budget elsewhere.

    Args:
        x: the result to check.
        ref: the oracle's result in fp64.
        naive: the oracle's result in x's dtype, from `worst_naive`.

    Returns:
        The error as a share of the budget.

    Raises:
        AssertionError: with the result's name; a `PastBudget` also has the error and the budget.
    """
    assert x.shape == ref.shape, f"{name} has shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    if x.numel() == 0:
        return 0.0
    x, ref, naive = x.detach(), ref.detach().to(x.device), naive.detach().to(x.device)
    assert not ref.isnan().any(), f"{name}: the reference has NaN, so nothing can be compared"
    infinite = ref.isinf()
    assert torch.equal(x.double()[infinite], ref.double()[infinite]), f"{name}: infinities differ"
    assert x[~infinite].isfinite().all(), f"{name} has NaN or inf where the reference is finite"
    if infinite.all():
        return 0.0
    error = float((x.double() - ref.double())[~infinite].abs().max())
    allowed = error_budget(ref, naive, x.dtype)
    if error > allowed:
        message = f"{name}: error {error:.3e} exceeds the budget {allowed:.3e}"
        raise PastBudget(message, error / allowed)
    return error / allowed


def assert_all_within_budget(
    names: Iterable[str], actual: Iterable[Tensor], ref: Iterable[Tensor], naive: Iterable[Tensor]
) -> float:
    """Check each result by `assert_within_budget`; return the largest share."""
    return max(starmap(assert_within_budget, zip(names, actual, ref, naive, strict=True)))
