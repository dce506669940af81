"""The error budget: how far a result may be from exact, and no other tolerance anywhere.

    max|x - ref|  <=  2 * max|naive - ref|  +  eps(dtype) * max|ref|  +  64 * eps(fp32)

ref is the oracle in fp64 and naive the oracle in the tested dtype, on the same inputs, which were
drawn in that dtype. The terms are what the formula itself costs in that dtype, one rounding of the
output, and a floor for gradients that cancel to zero.

One naive run may be exact by luck, and which run is differs from machine to machine: naive comes
from `orders.worst_naive`, the worst of several.
"""

import torch
from torch import Tensor


def error_budget(ref: Tensor, naive: Tensor, dtype: torch.dtype) -> float:
    """The largest error allowed for a result in `dtype`; entries that are infinite do not count."""
    ref = ref.double()
    finite = ref.isfinite()
    if not finite.any():
        return 64 * torch.finfo(torch.float32).eps
    formula = (naive.double() - ref)[finite].abs().max()
    rounding = torch.finfo(dtype).eps * ref[finite].abs().max()
    return float(2 * formula + rounding + 64 * torch.finfo(torch.float32).eps)


def assert_within_budget(name: str, x: Tensor, ref: Tensor, naive: Tensor) -> None:
    """x has no NaN, is infinite exactly where ref is, and else within the budget of its dtype.

    Args:
        x: the result to judge.
        ref: the same without rounding, computed in fp64.
        naive: the same computed naively in x's dtype, from `worst_naive`.

    Raises:
        AssertionError: naming the result, its error and the budget.
    """
    assert x.shape == ref.shape, f"{name} has shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    if x.numel() == 0:
        return
    x, ref, naive = x.detach(), ref.detach().to(x.device), naive.detach().to(x.device)
    infinite = ref.isinf()
    assert torch.equal(x.double()[infinite], ref.double()[infinite]), f"{name}: infinities differ"
    assert x[~infinite].isfinite().all(), f"{name} has NaN or inf where the reference is finite"
    if infinite.all():
        return
    error = float((x.double() - ref.double())[~infinite].abs().max())
    allowed = error_budget(ref, naive, x.dtype)
    assert error <= allowed, f"{name}: error {error:.3e} exceeds the budget {allowed:.3e}"
