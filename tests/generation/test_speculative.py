"""Speculative decoding: the model's own tokens at temperature 0, its own distribution otherwise."""

from itertools import permutations

import pytest
import torch
from nightly import gate_cases
from small_gpt import make_gpt

from fastattn.generation.drafts import Tree
from fastattn.generation.generate import generate_tokens
from fastattn.generation.request import Tally, make_request
from fastattn.generation.speculative import (
    SpeculativeDecoder,
    speculative_text,
    speculative_tokens,
    verify,
)
from fastattn.models.sampling import Sampling
from fastattn.training.tokenizers import CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

GREEDY = Sampling(greedy=True)


@pytest.mark.parametrize("drafts", [1, 7, (3, 2, 1)])
@pytest.mark.parametrize(
    ("draft_context", "prompt"), gate_cases([(12, 30), (5, 4)], [(12, 1), (30, 12)]), ids=str
)
def test_greedy_tokens_are_the_models_own(drafts, draft_context, prompt):
    """Also past both contexts, where windows start anew."""
    model, draft = make_gpt(), make_gpt(context=draft_context, num_layers=1)
    tokens = torch.randint(20, (prompt,)).tolist()
    expected = list(generate_tokens(model, tokens, 50, sampling=GREEDY))
    tally = Tally()
    got = speculative_tokens(model, draft, tokens, 50, drafts=drafts, sampling=GREEDY, tally=tally)
    assert list(got) == expected
    assert tally.tokens == 50
    assert 0 <= tally.accepted < tally.drafted


def test_a_draft_model_like_the_model_is_always_accepted():
    model = make_gpt(context=64)
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    twin = make_gpt(context=64)
    twin.load_state_dict(model.state_dict())
    tally = Tally()
    sampling = Sampling(greedy=True, repetition_penalty=1.3)
    got = list(speculative_tokens(model, twin, [1], 41, drafts=4, sampling=sampling, tally=tally))
    # The prompt gives one token, every later step four drafted ones and one more.
    assert (tally.drafted, tally.accepted, len(steps)) == (32, 32, 9)
    assert tally.acceptance_rate == 1.0
    assert got == list(generate_tokens(model, [1], 41, sampling=sampling))


@pytest.mark.parametrize("options", [{"positions": "rotary", "num_kv_heads": 1}, {"sinks": True}])
def test_the_accepted_path_of_a_tree_is_what_the_caches_hold(options):
    """Keys and values as of a text that was read at once, whichever branch each token came from."""
    model, draft = make_gpt(context=64, **options), make_gpt(context=64, num_layers=1, **options)
    request = make_request(model, [1, 2, 3], 45, sampling=Sampling(temperature=2.0), seed=0)
    tally = Tally()
    decoder = SpeculativeDecoder(model, draft, request, (3, 2, 1), tally)
    steps = 0
    while not request.done:
        decoder.step()
        steps += 1
        text = [1, 2, 3, *request.tokens]
        both = (decoder._model, decoder._unread), (decoder._draft, decoder._draft_unread)
        for tree, unread in both:
            held = text[: len(text) - len(unread)]
            assert tree._reading.tokens == held and held + unread == text
    for tree, _ in both:
        fresh = Tree(tree._model, 64, 15)
        with torch.inference_mode():
            fresh.read(tree._reading.tokens)
        n = fresh.cache.length(0)
        assert n == tree.cache.length(0) > 40
        for layer in range(tree.cache.num_layers):
            pairs = (x.cache.view([0], layer).gather()[:2] for x in (tree, fresh))
            for actual, expected in zip(*pairs, strict=True):
                torch.testing.assert_close(actual[:, :, :n], expected[:, :, :n])
    assert steps < 35 and 10 < tally.accepted < tally.drafted / 2


def test_a_tree_is_accepted_sooner_than_a_chain():
    """Each in as many steps; what a greedy draft model likes second is often right."""
    model, draft = make_gpt(context=64), make_gpt(context=64, num_layers=1)
    tallies = [Tally() for _ in range(2)]
    for drafts, tally in zip((2, (4, 4)), tallies, strict=True):
        list(speculative_tokens(model, draft, [1], 60, drafts=drafts, sampling=GREEDY, tally=tally))
    assert tallies[0].accepted < tallies[1].accepted


@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_verification_follows_the_distribution_exactly(drafted):
    """Over an even grid of the random numbers, for every draft with the share that it has.

    All bounds, p / q and the cumulative sums, are multiples of 1/12: the grid meets them exactly.
    """
    p = torch.tensor([[6, 3, 3], [0, 4, 8], [3, 3, 6]], dtype=torch.float64) / 12
    q = torch.tensor([[4, 6, 2], [4, 4, 4]], dtype=torch.float64) / 12
    grid = [(i + 0.5) / 12 for i in range(12)]
    share = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        for number in grid:
            for last in grid:
                drafts, numbers = [token, 1][:drafted], [number, 0.0][:drafted]
                q_of = list(q[:drafted])
                given = p[: drafted + 1], q_of, drafts, [*numbers, last], [-1, 0][:drafted]
                path, following = verify(*given)
                share[token if path else following] += q[0, token] / len(grid) ** 2
    torch.testing.assert_close(share, p[0], atol=1e-12, rtol=0)


def test_siblings_follow_the_distribution_exactly():
    """Two drafts, the second of which is drawn without the first.

    p / q is 1/6, and behind a rejection 3/5 at least: grids of 30 and 5 meet those.
    """
    p = torch.tensor([1, 5, 3, 3], dtype=torch.float64) / 12
    q = torch.tensor([6, 2, 2, 2], dtype=torch.float64) / 12
    share = torch.zeros(4, dtype=torch.float64)
    for first, second in permutations(range(4), 2):
        rest = q.clone()
        rest[first] = 0
        rest /= rest.sum()
        weight = q[first] * rest[second] / 150
        for one in range(30):
            for two in range(5):
                numbers = [(one + 0.5) / 30, (two + 0.5) / 5, 0.5]
                path, token = verify(p.expand(3, 4), [q, rest], [first, second], numbers, [-1, -1])
                share[(first, second)[path[0]] if path else token] += weight
    torch.testing.assert_close(share, p, atol=1e-12, rtol=0)


def test_verification_keeps_what_can_be_kept():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    q = [torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])]
    assert verify(p, q, [0, 0], [0.99, 0.99, 0.5], [-1, 0]) == ([0, 1], 1)
    assert verify(p, q, [1, 1], [0.99, 0.0, 0.5], [-1, 0]) == ([0], 0)
    # The second of two at once, and what follows it.
    tree = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert verify(tree, [*q, q[0]], [0, 1, 1], [0.5] * 4, [-1, -1, 1]) == ([1, 2], 0)
    # Where nothing of p is left over q, p itself serves.
    certain = torch.tensor([0.0, 1.0])
    assert verify(torch.stack([certain, certain]), [certain], [0], [0.0, 0.5], [-1]) == ([], 1)


def test_end_tokens_and_stop_strings_end_the_text():
    model, draft = make_gpt(4), make_gpt(4, num_layers=1)
    tokens = list(generate_tokens(model, [1], 60, sampling=GREEDY))
    end = tokens[5]
    expected = list(generate_tokens(model, [1], 60, sampling=GREEDY, end_token=end))
    got = list(speculative_tokens(model, draft, [1], 60, sampling=GREEDY, end_token=end))
    assert got == expected == tokens[: tokens.index(end)]
    tokenizer = CharacterTokenizer("abcd")
    text = tokenizer.decode(tokens)
    stop = text[20:23]
    pieces = speculative_text(model, draft, tokenizer, "b", 60, sampling=GREEDY, stop=[stop])
    assert "".join(pieces) == text[: text.index(stop)]
