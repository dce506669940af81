"""examples/speculative.py: greedy tokens are the model's own, others follow its distribution."""

from itertools import permutations, product

import pytest
import torch
from small_gpt import make_gpt
from speculative import speculative_tokens, verify

from fastattn.generation import Sampling, generate_tokens

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

GREEDY = Sampling(greedy=True)
LATENT = {"positions": "rotary", "kv_latent_dim": 6}


@pytest.mark.parametrize("widths", [(3, 2), (1, 1, 1), (2, 1, 3), (25,)], ids=str)
@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"positions": "rotary"}, LATENT], ids=str)
def test_greedy_tokens_are_the_models_own(options, widths):
    model, small = (make_gpt(context=60, num_layers=n, **options) for n in (2, 1))
    chosen: set[int] = set()
    for prompt in ([1], [2, 3], [5, 6, 7, 8, 9]):
        expected = list(generate_tokens(model, prompt, 20, sampling=GREEDY))
        assert (
            list(speculative_tokens(model, small, prompt, 20, widths=widths, how=GREEDY))
            == expected
        )
        chosen |= {*expected}
    assert len(chosen) > 3


def test_a_model_accepts_its_own_drafts():
    model, passes = make_gpt(context=64), []
    twin = make_gpt(context=64)
    twin.load_state_dict(model.state_dict())
    model.register_forward_hook(lambda *_: passes.append(1))
    for how in (Sampling(), GREEDY):
        passes.clear()
        list(speculative_tokens(model, twin, [1], 40, widths=[1] * 4, how=how))
        assert len(passes) == 8  # four drafts and one more token each


@torch.no_grad()
@pytest.mark.parametrize("widths", [(2, 2), (1, 1)], ids=str)
def test_tokens_follow_the_models_distribution(widths):
    """How often each token comes, less its probabilities, is a martingale of known variance."""
    model, small = (make_gpt(4, context=320, num_layers=n, std=0.4) for n in (2, 1))
    how, n = Sampling(temperature=1.2, top_k=3), 300
    tokens = list(speculative_tokens(model, small, [1], n, widths=widths, how=how, seed=1))
    p = how.probabilities(model(torch.tensor([[1, *tokens[:-1]]]))[0][0])
    left = torch.nn.functional.one_hot(torch.tensor(tokens), 4) - p
    assert (left.sum(0).abs() <= 3 * (p * (1 - p)).sum(0).sqrt()).all()
    assert ((p > 0.1).sum(1) > 1).float().mean() > 0.5


def test_verified_siblings_follow_the_distribution_exactly():
    """Two drafts, the second of which is drawn without the first, and a child of the first.

    p / q is 1/6, and behind a rejection 3/5 at least: grids of 30 and 5 meet those.
    """
    p = torch.tensor([1, 5, 3, 3], dtype=torch.float64) / 12
    q = torch.tensor([6, 2, 2, 2], dtype=torch.float64) / 12
    after = torch.eye(4, dtype=torch.float64)
    share = torch.zeros(4, dtype=torch.float64)
    for first, second in permutations(range(4), 2):
        rest = q.clone()
        rest[first] = 0
        rest /= rest.sum()
        for one, two in product(range(30), range(5)):
            numbers = [(one + 0.5) / 30, (two + 0.5) / 5, 0.5]
            given = [first, second, 2], [-1, -1, 0], numbers
            path, following = verify(torch.stack([p, *after[:3]]), [q, rest, after[2]], *given)
            assert path in ([], [0], [1])  # the model gives the child, token 2, no chance after it
            assert not path or torch.equal(following, after[path[0]])
            weight = q[first] * rest[second] / 150
            share += weight * (after[(first, second)[path[0]]] if path else following)
    torch.testing.assert_close(share, p, atol=1e-12, rtol=0)


def test_verification_keeps_what_can_be_kept():
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    half = torch.tensor([0.5, 0.5])
    path, following = verify(p, [half] * 3, [0, 1, 1], [-1, -1, 1], [0.5] * 3)
    assert path == [1, 2] and torch.equal(following, p[3])
    # Where nothing of p is left over q, p itself serves.
    path, following = verify(p[:2], [p[0]], [0], [-1], [0.0])
    assert path == [] and torch.equal(following, p[0])
