"""Slopes, buckets and ids, against published values and rules written out."""

import math

import pytest
import torch

import fastattn


def test_slopes_of_a_power_of_two() -> None:
    slopes = fastattn.alibi_slopes(8)
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == [2.0**-n for n in range(1, 9)]


def test_slopes_between_powers_of_two() -> None:
    """BLOOM and the paper's code: those of 8 heads, then every other one of 16."""
    expected = [2.0**-n for n in range(1, 9)] + [2.0**-x for x in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(fastattn.alibi_slopes(12), torch.tensor(expected))
    assert fastattn.alibi_slopes(1).tolist() == [2.0**-8]


def bucket(key_minus_query: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's rule for one distance, in Python's own numbers."""
    first, n = 0, -key_minus_query
    if bidirectional:
        buckets //= 2
        first = buckets if n < 0 else 0
        n = abs(n)
    n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return first + n
    far = math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + int(far), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5_buckets(bidirectional: bool, buckets: int, max_distance: int) -> None:
    table = torch.arange(buckets, dtype=torch.float32)[:, None] + torch.tensor([0.0, 100.0])
    R = 150
    bias = fastattn.t5_relative_bias(table, R, bidirectional, max_distance)
    assert bias.shape == (2, 2 * R + 1)
    expected = [bucket(-n, bidirectional, buckets, max_distance) for n in range(-R, R + 1)]
    assert bias[0].tolist() == expected
    assert (bias[1] - bias[0] == 100).all()


def test_t5_gradients_reach_the_table() -> None:
    for derive in (torch.func.jacrev, torch.func.jacfwd):
        grad = derive(lambda x: fastattn.t5_relative_bias(x, 5, True, 6).sum())(torch.zeros(8, 1))
        assert grad.sum() == 11


def test_document_ids() -> None:
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert fastattn.document_ids(starts, 7).tolist() == [[0, 0, 2, 2, 2, -1, -1]]
    assert fastattn.document_ids(torch.tensor([0]), 2).tolist() == [[-1, -1]]
    assert fastattn.document_ids(torch.tensor([0, 0]), 0).shape == (1, 0)
