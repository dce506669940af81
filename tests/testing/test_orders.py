"""The worst of several naive runs: a bound that one lucky order of summation does not narrow."""

import math

import pytest
import torch
from torch import Tensor

from fastattn import reference
from fastattn.testing import make_qkv, worst_naive
from fastattn.testing.compare import results
from fastattn.testing.orders import RUNS, OtherOrder


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return results(reference.attention, q, k, v, causal=True)


@pytest.mark.parametrize("base_two", [False, True])
def test_other_orders_compute_the_same(base_two: bool) -> None:
    inputs = [x.double() for x in make_qkv(2, 4, 2, 9, 11, 8)]
    expected = attention(*inputs)
    with OtherOrder(1, base_two=base_two):
        actual = attention(*inputs)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert not all(map(torch.equal, actual, expected))


def linear(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(torch.ones(1), x, y)


@pytest.mark.parametrize(
    "compute",
    [torch.matmul, linear, lambda x, y: (x * y.T).sum(1), lambda x, y: (x @ y).softmax(1)],
)
def test_terms_are_summed_in_another_order_and_rounded_otherwise(compute) -> None:
    x, y = torch.randn(7, 300), torch.randn(300, 7)
    plain = compute(x, y)
    results = []
    for seed in (1, 2, 2):
        with OtherOrder(seed):
            results.append(compute(x, y))
    assert not torch.equal(results[0], plain) and not torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    # Products of small integers have exact sums: only a last bit is left to differ.
    x, y = x.round(), y.round()
    with OtherOrder(1):
        torch.testing.assert_close(compute(x, y), compute(x, y), rtol=2**-22, atol=1e-6)


def test_a_row_of_one_key_has_gradients_as_coarse_as_fused_ones() -> None:
    """A softmax of one score is 1, whose derivative naive code finds to be 0 exactly."""
    score, gradient = torch.tensor([[0.0]], requires_grad=True), torch.tensor([[3.0]])

    def derivative() -> Tensor:
        return torch.autograd.grad(score.softmax(-1), score, gradient)[0]

    assert not derivative().any()
    worst = worst_naive(torch.zeros(1, 1, dtype=torch.float64), derivative, runs=32)
    eps = 3 * torch.finfo(torch.float32).eps
    assert eps < worst.abs() <= 2 * eps  # by the weight's rounding alone it is 0.67 eps


def test_equal_numbers_move_alike() -> None:
    x = torch.randn(100)
    with OtherOrder(1):
        one, other = (torch.cat((x, x)) * torch.ones(200)).chunk(2)
    assert torch.equal(one, other) and not torch.equal(one, x)
    # Of 16 bits they are different numbers that were rounded: a tie is none in another order.
    with OtherOrder(1, narrow=True):
        one, other = (torch.cat((x, x)).bfloat16() * torch.ones(200).bfloat16()).chunk(2)
    assert not torch.equal(one, other)


def test_scores_of_16_bits_are_not_computed_twice() -> None:
    """At 10^4 neighbours are 8 apart: 2^8 in place of a weight."""
    scores = torch.tensor([[1e4, 1e4 - 8]], dtype=torch.float16)
    for seed in range(8):
        with OtherOrder(seed, base_two=True, narrow=True):
            weights = (scores @ torch.eye(2, dtype=torch.float16)).softmax(-1)
        assert weights.amax() < 1.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_in_16_bits_move_to_neighbours_where_asked(dtype: torch.dtype) -> None:
    x, y = torch.randn(7, 30).to(dtype), torch.eye(30, dtype=dtype)
    with OtherOrder(1):
        assert torch.equal(x @ y, x)
    with OtherOrder(1, narrow=True):
        actual = x @ y
    assert not torch.equal(actual, x)
    torch.testing.assert_close(actual, x, rtol=1.5 * torch.finfo(dtype).eps, atol=0)
    x = torch.tensor([2.0, math.inf, 0.0], dtype=dtype).repeat(20, 1)  # a unit of 2 is 2 eps
    for compute in (lambda x: x * torch.ones(3, dtype=dtype), lambda x: x.float().to(dtype)):
        with OtherOrder(1, narrow=True):
            actual = compute(x)
        assert (actual[:, 0] != 2).any() and torch.equal(actual[:, 1:], x[:, 1:])


def test_entries_farthest_from_exact_are_kept() -> None:
    """NaN the farthest; every run draws the same numbers, and disturbs nobody's."""
    exact = torch.tensor([1.0, 2.0, -math.inf, 4.0, 5.0], dtype=torch.float64)
    errors = [[0.1, 0.0, -math.inf, 0.0, math.nan], [-0.2, 0.1, -math.inf, 0.0, 0.0]]
    off, drawn = iter(torch.tensor(errors * RUNS)), []

    def run() -> dict[str, tuple[Tensor, ...]]:
        drawn.append(tuple(torch.rand(3).tolist()))
        return {"x": ((exact + next(off)).float(), torch.tensor([3]))}

    (actual, integers) = worst_naive({"x": (exact, torch.tensor([3]))}, run)["x"]
    assert actual[:4].tolist() == pytest.approx([0.8, 2.1, -math.inf, 4.0])
    assert actual[4].isnan() and integers.tolist() == [3]
    assert len(drawn) == RUNS and len(set(drawn)) == 1
    assert torch.rand(3).tolist() != list(drawn[0])
