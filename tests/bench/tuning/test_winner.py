"""The rule for a winner."""

import pytest

from fastattn.bench.tuning.winner import beats, halves, score, winner

SHIPPED = [[10.0] * 10, [20.0] * 10]


def scaled(*factors: float) -> list[list[float]]:
    """Ten samples of each case, the shipped one's times these factors in turn."""
    return [[ms * f for ms, f in zip(of, factors * 10, strict=False)] for of in SHIPPED]


@pytest.mark.parametrize(
    ("saved", "wins"), [(0.0, False), (0.029, False), (0.031, True), (0.3, True), (-0.2, False)]
)
def test_a_winner_saves_more_than_three_percent(saved, wins):
    assert beats(SHIPPED, scaled(1 - saved)) == wins


def test_halves_that_disagree_make_no_winner():
    """The median of all samples is 8 % less, for a while that the GPU was cooler."""
    fast, slow = [0.9] * 6, [1.0] * 4
    for order in (fast + slow, slow + fast):
        assert score(scaled(*order)) < 0.97 * score(SHIPPED)
        assert not beats(SHIPPED, scaled(*order))
    assert beats(SHIPPED, scaled(0.9, 0.95))


def test_halves_are_of_time_and_of_every_case():
    first, second = halves([[1.0, 2.0, 3.0], [4.0, 5.0]])
    assert (first, second) == ([[1.0, 2.0], [4.0]], [[2.0, 3.0], [5.0]])


def test_a_causal_case_weighs_as_much_as_one_with_twice_the_pairs():
    assert score([[1.0], [2.0]]) == 4.0
    assert score([[3.0]]) == 3.0
    # Faster where all is causal by as much as it is slower elsewhere.
    assert not beats(SHIPPED, [[8.0] * 10, [24.0] * 10])


def test_the_fastest_that_beats_the_shipped_one_wins():
    others = {
        "noisy": scaled(*[0.7] * 6, *[1.0] * 4),
        "fast": scaled(0.8),
        "slower": scaled(0.9),
        "the same": SHIPPED,
    }
    found = winner(SHIPPED, others)
    assert found is not None and found.name == "fast"
    assert found.gain == pytest.approx(0.2)
    assert winner(SHIPPED, {"noisy": others["noisy"], "the same": SHIPPED}) is None
    assert winner(SHIPPED, {}) is None
