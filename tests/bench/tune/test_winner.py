"""The rule for a winner."""

import pytest

from fastattn.bench.tune.trial import score, winner

SHIPPED = [[10.0] * 10, [20.0] * 10]


def scaled(*factors: float) -> list[list[float]]:
    """Ten samples of each case, the shipped one's times these factors in turn."""
    return [[ms * f for ms, f in zip(of, factors * 10, strict=False)] for of in SHIPPED]


FAST, SLOW = [0.9] * 6, [1.0] * 4


@pytest.mark.parametrize(
    ("samples", "wins"),
    [
        (scaled(0.971), False),
        (scaled(0.969), True),
        # The median of all samples is 8 % less, for a while that the GPU was cooler.
        (scaled(*FAST, *SLOW), False),
        (scaled(*SLOW, *FAST), False),
        (scaled(0.9, 0.95), True),
        # Faster where all is causal by as much as it is slower elsewhere.
        ([[8.0] * 10, [24.0] * 10], False),
        ([[8.0] * 10, [20.0] * 10], True),
    ],
)
def test_a_winner_saves_more_than_three_percent_in_both_halves(samples, wins):
    assert bool(winner(SHIPPED, {"other": samples})) == wins


def test_the_halves_are_of_every_case_and_of_an_odd_number_too():
    assert score([[1.0], [2.0]]) == 4.0 and score([[3.0]]) == 3.0
    shipped = [[10.0] * 3, [10.0] * 5]
    # The middle sample belongs to both halves.
    assert winner(shipped, {"other": [[5.0] * 3, [5.0] * 3 + [10.0] * 2]}) is not None
    assert winner(shipped, {"other": [[5.0, 10.0, 10.0], [10.0] * 5]}) is None


def test_the_fastest_that_beats_the_shipped_one_wins():
    noisy = {"noisy": scaled(*[0.7] * 6, *[1.0] * 4), "the same": SHIPPED}
    others = {**noisy, "slower": scaled(0.9), "fast": scaled(0.8)}
    assert winner(SHIPPED, others) == ("fast", pytest.approx(0.2))
    assert winner(SHIPPED, noisy) is winner(SHIPPED, {}) is None
