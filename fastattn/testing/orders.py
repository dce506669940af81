"""The worst rounding error of a naive computation over several orders of summation.

The order of summation, and with it the rounding error, depends on a machine's BLAS. On a small case
the largest error of one run may be a quarter of the next one's, and a budget from the lucky run
fails correct code. `worst_naive` runs the computation in several orders and keeps, for each entry,
the result farthest from exact.

The runs differ only as correct implementations do:

- Every sum of a matrix product, a reduction or a softmax takes its terms in a random order.
- Results in fp32 move by up to half a unit in the last place, at random, as with fused
  multiply-adds, another exponential or another association (Parker 1997, "Monte Carlo
  arithmetic"). Results in 16 bits do not: naive code rounds all of them, fused code few. But of
  results that are a number or two all may round to what is exact, in any order: in runs after the
  first RUNS they move to a neighbour.
- Every other run computes the weights as a fused backward does, from scores and lse in fp32 and
  base 2: w = 2^(s log2(e) - lse log2(e)), with s and lse each rounded once more (Dao et al. 2022,
  arXiv 2205.14135). A naive softmax divides by its own sum, where these errors cancel: at scores
  of about 20 its gradients are four times as exact as any computed from lse. Its delta is the sum
  of weights times gradients that are rounded apart, as a fused backward's, the sum of o do, is
  rounded apart from v do: of a row that sees one key, naive code subtracts a number from itself.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

RUNS = 5
LOG2E = math.log2(math.e)
Results = TypeVar("Results")
_aten = torch.ops.aten
# Operators that round. Their in-place forms are left alone.
_ROUNDING_NAMES = """
    add sub mul div pow sqrt rsqrt exp exp2 log logsumexp tanh sigmoid silu gelu sum mean
    mm bmm addmm baddbmm _softmax _softmax_backward_data
"""
_ROUNDING = frozenset(getattr(_aten, name) for name in _ROUNDING_NAMES.split())


def worst_naive(exact: Results, run: Callable[[], Results], runs: int = RUNS) -> Results:
    """The results of run(), each entry from the run in which it is farthest from exact.

    Args:
        exact: the results without rounding: a tensor, or tuples, lists and dicts of tensors.
        run: computes in the tested dtype; called `runs` times, from the same state of the
            generator.
        runs: how many orders. Among thousands of cases there are results of so few numbers that
            RUNS orders are all lucky.
    """
    state = torch.get_rng_state()
    found = run()
    for seed in range(1, runs):
        torch.set_rng_state(state)
        with OtherOrder(seed, base_two=seed % 2 == 1, narrow=seed >= RUNS):
            again = run()
        found = tree_map(_farther, exact, found, again)
    return found


def _farther(exact: Any, one: Any, other: Any) -> Any:
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return one
    wide = exact.detach().to(one.device, torch.float64)
    # Equal infinities give NaN, which compares as not farther.
    return torch.where(
        (other.detach().double() - wide).abs() > (one.detach().double() - wide).abs(),
        other.detach(),
        one.detach(),
    )


class OtherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this mode the order of sums and the last bit of fp32 results are random, by a seed.

    Args:
        base_two: softmax computes 2^(x log2(e) - lse log2(e)), from lse in fp32 (fp64: in fp64).
        narrow: results in 16 bits move too, by up to one unit.
    """

    def __init__(self, seed: int, *, base_two: bool = False, narrow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.base_two = base_two
        self._units = {torch.float32: 0.5}
        if narrow:
            self._units |= {torch.float16: 1.0, torch.bfloat16: 1.0}
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = self._reordered(func, args, kwargs or {})
        if func.overloadpacket not in _ROUNDING or func._schema.is_mutable:
            return found
        if not isinstance(found, Tensor):
            return found
        return self._rounded(found)

    def _rounded(self, x: Tensor) -> Tensor:
        """x moved by up to half a unit in the last place, in 16 bits to a neighbour."""
        units = self._units.get(x.dtype)
        if units is None:
            return x
        places = (2 * torch.rand(x.shape, generator=self._generator) - 1).to(x.device)
        return (x * (1 + units * torch.finfo(x.dtype).eps * places)).to(x.dtype)

    def _reordered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (_aten.mm.default, _aten.bmm.default):
            return func(*self._inner(*args), **kwargs)
        if func in (_aten.addmm.default, _aten.baddbmm.default):
            return func(args[0], *self._inner(*args[1:]), **kwargs)
        if func is _aten.sum.dim_IntList:
            x, dims, *rest = args
            for dim in dims or range(x.dim()):
                x = x.index_select(dim, self._order(x, dim))
            return func(x, dims, *rest, **kwargs)
        if func is _aten._softmax.default:
            return self._softmax(*args)
        if func is _aten._softmax_backward_data.default:
            grad, out, dim, dtype = args
            order = self._order(out, dim)
            grad, weights = grad.index_select(dim, order), out.index_select(dim, order)
            if self.base_two:
                delta = (self._rounded(grad) * weights).sum(dim, keepdim=True)
                found = (weights * (grad - delta)).to(dtype)
            else:
                found = func(grad, weights, dim, dtype)
            return found.index_select(dim, order.argsort())
        return func(*args, **kwargs)

    def _order(self, x: Tensor, dim: int) -> Tensor:
        return torch.randperm(x.shape[dim], generator=self._generator).to(x.device)

    def _inner(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a matrix product with their inner dim in another order."""
        order = self._order(a, -1)
        return a.index_select(a.dim() - 1, order), b.index_select(b.dim() - 2, order)

    def _softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        order = self._order(x, dim)
        shuffled = x.index_select(dim, order)
        if not self.base_two or not x.numel():
            weights = torch._softmax(shuffled, dim, half_to_float)
        else:
            wide = shuffled.to(torch.promote_types(x.dtype, torch.float32))
            scores = wide * LOG2E
            largest = scores.amax(dim, keepdim=True)
            lse = (largest + (scores - largest).exp2().sum(dim, keepdim=True).log2()) / LOG2E
            weights = (self._rounded(scores) - lse * LOG2E).exp2()
            weights = weights if half_to_float else weights.to(x.dtype)
        return weights.index_select(dim, order.argsort())
