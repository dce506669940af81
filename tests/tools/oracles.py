"""Results by the error budget, against an oracle that computes in any dtype."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_all_within_budget


def assert_by_oracle(
    actual: Iterable[Tensor],
    oracle: Callable[[torch.dtype], Any],
    dtype: torch.dtype = torch.float32,
    names: str = "o lse",
) -> None:
    """Check results: those of the oracle in fp64 are exact, and in dtype naive."""
    actual, exact = list(actual), oracle(torch.float64)
    labels = [*names.split(), *(f"result {i}" for i in range(len(actual)))][: len(actual)]
    naive = worst_naive(exact, lambda: oracle(dtype))
    assert_all_within_budget(labels, actual, exact, naive)


def with_gradients(
    function: Callable[..., Tensor], tensors: Iterable[Any], dtype: torch.dtype
) -> list[Tensor]:
    """A function's result, and the gradients of its squares' sum by each tensor of numbers."""
    given = [x.detach().to(dtype) if _is_number(x) else x for x in tensors]
    leaves = [x.requires_grad_() for x in given if _is_number(x)]
    o = function(*given)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
