"""Worst rounding error of a naive computation over several orders of summation.

The order of summation, and so the rounding error, depends on a machine's BLAS. On small cases the
largest errors of two runs may differ by a factor of 4, and a budget from the lucky run fails
correct code. `worst_naive` runs the computation in several orders and keeps, for each entry, the
result farthest from exact.

Runs differ as correct implementations do:

- Every sum of a matrix product, a reduction or a softmax takes its terms in a random order.
- Results in fp32 move randomly by up to half a unit in the last place, as with fused multiply-adds,
  another exponential or another association (Parker 1997, "Monte Carlo arithmetic"). Equal results
  move equally, so that errors of copied rows add up. Results in 16 bits do not move, as naive code
  already rounds more of them than fused code. But one or two numbers may round to the exact result
  in every order, so in runs after the first RUNS they move to a neighbour.
- Every other run computes weights and their gradients as a fused backward does (Dao et al. 2022,
  arXiv 2205.14135): w = 2^(s log2(e) - lse log2(e)) in fp32, with s recomputed in another order
  than for lse. Delta is summed in another order, as a fused backward sums o do, not v do. Naive
  code divides by its own sum and subtracts its own gradients. So at scores of about 20 it is four
  times as exact as code that uses lse, and exact in rows with one key.
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
# Operators that round. In-place forms are excluded.
_ROUNDING_NAMES = """
    add sub mul div pow sqrt rsqrt exp exp2 log logsumexp tanh sigmoid silu gelu sum mean
    mm bmm addmm baddbmm _softmax _softmax_backward_data
"""
_ROUNDING = frozenset(getattr(_aten, name) for name in _ROUNDING_NAMES.split())
_PRODUCTS = frozenset((_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm))
_WORD = 2**32 - 1


def worst_naive(exact: Results, run: Callable[[], Results], runs: int = RUNS) -> Results:
    """Results of run(), each entry from the run in which it is farthest from exact.

    Args:
        exact: results without rounding: a tensor, or tuples, lists and dicts of tensors.
        run: computes in the tested dtype; called `runs` times with the same generator state.
        runs: number of orders. Among thousands of cases, some have so few numbers that RUNS orders
            are all lucky.
    """
    state = torch.get_rng_state()
    worst = run()
    for seed in range(1, runs):
        torch.set_rng_state(state)
        with OtherOrder(seed, base_two=seed % 2 == 1, narrow=seed >= RUNS):
            again = run()
        worst = tree_map(_farther, exact, worst, again)
    return worst


def _farther(exact: Any, one: Any, other: Any) -> Any:
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return one
    wide = exact.detach().to(one.device, torch.float64)
    # The difference of equal infinities is NaN, which is not farther.
    return torch.where(
        (other.detach().double() - wide).abs() > (one.detach().double() - wide).abs(),
        other.detach(),
        one.detach(),
    )


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage().data_ptr(), x.data_ptr(), x.shape, x.stride(), x.dtype


class OtherOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode with a random order of sums and random last bits of fp32 results, by a seed.

    base_two: softmax computes 2^(x log2(e) - lse log2(e)), with lse in fp32 (fp64: in fp64).
    narrow: 16-bit results move too, by up to one unit.
    """

    def __init__(self, seed: int, *, base_two: bool = False, narrow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.base_two = base_two
        self._units = {torch.float32: 0.5}
        if narrow:
            self._units |= {torch.float16: 1.0, torch.bfloat16: 1.0}
        self._generator = torch.Generator().manual_seed(seed)
        self._again: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = self._computed(func, args, kwargs)
        if self.base_two:
            self._compute_again(func, args, kwargs, result)
        return result

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._reordered(func, args, kwargs)
        rounds = func.overloadpacket in _ROUNDING
        if func.overloadpacket is _aten._to_copy:
            x = args[0]  # in torch.vmap also a number
            rounds = isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 2
            rounds = rounds and result.dtype.itemsize == 2
        if not rounds or func._schema.is_mutable:
            return result
        return self._rounded(result) if isinstance(result, Tensor) else result

    def _compute_again(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Recompute products, and results that depend on them, in another order; keep these."""
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            changed = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            self._again = {key: kept for key, kept in self._again.items() if key[0] not in changed}
            return
        others = tree_map(self._other, args)
        depends = any(x is not other for x, other in zip(args, others, strict=True))
        # Fused code keeps scores of 16-bit inputs in fp32.
        if not isinstance(result, Tensor) or result.dtype not in (torch.float32, torch.float64):
            return
        if depends or func.overloadpacket in _PRODUCTS:
            again = self._computed(func, others, kwargs)
            # Keep the result alive, so that no other tensor gets its memory.
            self._again[_place(result)] = result, again

    def _other(self, x: Any) -> Any:
        """x computed in another order, or x itself if the order is irrelevant."""
        if not isinstance(x, Tensor):
            return x
        return self._again.get(_place(x), (x, x))[1]

    def _rounded(self, x: Tensor) -> Tensor:
        """Move x by up to half a unit in the last place, in 16 bits to a neighbour."""
        units = self._units.get(x.dtype)
        if units is None:
            return x
        step = units * torch.finfo(x.dtype).eps * self._places(x)
        if x.dtype == torch.float32:
            return (x * (1 + step)).to(x.dtype)
        # Reaches the neighbours of every number, also just above powers of two.
        power = torch.ldexp(torch.ones_like(step), torch.frexp(x.float()).exponent - 1)
        return torch.where(x.isfinite() & (x != 0), x + step * power, x).to(x.dtype)

    def _places(self, x: Tensor) -> Tensor:
        """fp64 numbers in (-1, 1) from a hash of x's bits in fp32, so equal where x is.

        For 16 bits they are random, as equal rounded numbers need not have been equal.
        """
        if x.dtype != torch.float32:
            return 2 * torch.rand(x.shape, generator=self._generator).to(x.device).double() - 1
        bits = x.contiguous().view(torch.int32).long() & _WORD
        mixed = bits ^ int(torch.randint(_WORD, (), generator=self._generator))
        for factor in (0x9E3779B1, 0x85EBCA6B):
            mixed = (mixed * factor) & _WORD
            mixed = mixed ^ (mixed >> 15)
        return mixed.double() / 2**31 - 1

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
                other = self._rounded(self._other(args[0]).index_select(dim, order))
                delta = (other * weights).sum(dim, keepdim=True)
                result = (weights * (grad - delta)).to(dtype)
            else:
                result = func(grad, weights, dim, dtype)
            return result.index_select(dim, order.argsort())
        return func(*args, **kwargs)

    def _order(self, x: Tensor, dim: int) -> Tensor:
        return torch.randperm(x.shape[dim], generator=self._generator).to(x.device)

    def _inner(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of a matrix product with a permuted inner dim."""
        order = self._order(a, -1)
        return a.index_select(a.dim() - 1, order), b.index_select(b.dim() - 2, order)

    def _softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        order = self._order(x, dim)
        shuffled = x.index_select(dim, order)
        if not self.base_two or not x.numel():
            weights = torch._softmax(shuffled, dim, half_to_float)
        else:
            other = self._other(x).index_select(dim, order)
            one, two = (
                y.to(torch.promote_types(x.dtype, torch.float32)) * LOG2E for y in (shuffled, other)
            )
            largest = one.amax(dim, keepdim=True)
            lse = (largest + (one - largest).exp2().sum(dim, keepdim=True).log2()) / LOG2E
            weights = (self._rounded(two) - self._rounded(lse) * LOG2E).exp2()
            weights = weights if half_to_float else weights.to(x.dtype)
        return weights.index_select(dim, order.argsort())
