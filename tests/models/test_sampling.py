"""Settings of sampling: what each rules out, and that draws follow what is left."""

import math

import pytest
import torch

from fastattn.models.sampling import Sampling, draw

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0], [0.0, -2.0, 5.0, 1.0, 1.0]])


def test_greedy_takes_the_first_highest():
    assert Sampling(greedy=True, top_k=1).choose(LOGITS).tolist() == [1, 2]


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # The highest and their equals.
        *(({"top_k": k}, left) for k, left in ((1, [0]), (3, [0, 2, 3]), (9, ALL))),
        # The fewest that reach it, of what top-k has left.
        *(
            ({"top_p": p}, left)
            for p, left in ((0.01, [0]), (0.49, [0]), (0.6, [0, 2]), (1.0, ALL))
        ),
        ({"top_p": 0.9}, [0, 2, 3]),
        ({"top_p": 0.5, "top_k": 2}, [0]),
        # By the likeliest one, as temperature has made them.
        *(({"min_p": p}, left) for p, left in ((0.05, ALL), (0.2, [0, 2, 3]), (0.5, [0, 2]))),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.5, "temperature": 0.5}, [0]),
        ({"min_p": 0.5, "temperature": 2.0}, [0, 2, 3]),
        # By itself, of what top-k has left, and the likeliest: the second has three eighths.
        *(({"epsilon_cutoff": p}, left) for p, left in ((0.03, ALL), (0.1, [0, 2, 3]), (1.0, [0]))),
        ({"epsilon_cutoff": 0.29}, [0, 2]),
        ({"epsilon_cutoff": 0.35, "top_k": 2}, [0, 2]),
    ],
    ids=str,
)
def test_tokens_are_kept_by_their_probability(settings, expected):
    even, uneven = torch.tensor([[0.25] * 4, [0.5, 0.05, 0.3, 0.15]]).log()
    scores = Sampling(**settings).filter(torch.stack((uneven, even)))
    assert scores[0].isfinite().nonzero().flatten().tolist() == expected
    assert torch.equal(scores[0, expected], uneven[expected] / settings.get("temperature", 1.0))
    if not settings.keys() & {"top_p", "top_k"}:
        assert scores[1].isfinite().all(), "equals are all the likeliest"


def test_draws_follow_the_distribution():
    sampling = Sampling(temperature=2.0, top_k=3)
    logits = torch.tensor([0.0, 1.0, 2.0, -3.0]).expand(20_000, 4)
    drawn = sampling.choose(logits, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / 20_000
    expected = torch.tensor([0.0, 0.5, 1.0, -math.inf]).softmax(0)
    # Five standard deviations of a share.
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_a_repetition_penalty_lowers_scores_of_either_sign():
    seen = torch.tensor([[True, True, False, False, True], [False] * 5])
    got = Sampling(repetition_penalty=2.0).filter(LOGITS, seen)
    assert got.tolist() == [[0.5, 1.5, 2.0, 3.0, -2.0], LOGITS[1].tolist()]
    assert torch.equal(Sampling(repetition_penalty=2.0).filter(LOGITS), LOGITS)
    assert torch.equal(Sampling().filter(LOGITS, seen), LOGITS)


def test_a_draw_inverts_the_distribution():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(6, 5)
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.9999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities, numbers).tolist() == [1, 1, 3, 3, 3, 3]
    assert draw(4 * probabilities, numbers).tolist() == [1, 1, 3, 3, 3, 3]


def test_the_greatest_number_never_points_behind_the_last_token():
    """Whatever the sum is that it is multiplied by."""
    torch.manual_seed(0)
    sums = torch.cat([1 + 2.0**-52 * torch.arange(100), torch.rand(1000), 2.0 ** -torch.arange(99)])
    probabilities = torch.stack([0 * sums, sums.double(), 0 * sums], dim=1)
    greatest = torch.full_like(sums, 1 - 2**-53, dtype=torch.float64)
    assert (draw(probabilities, greatest) == 1).all()
