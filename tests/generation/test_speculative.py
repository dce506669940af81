"""Speculative decoding: the model's own tokens at temperature 0, its own distribution otherwise."""

import pytest
import torch
from nightly import gate_cases
from small_gpt import make_gpt

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


@pytest.mark.parametrize("drafts", [1, 7])
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


def test_both_models_hold_the_text_as_it_is():
    """Whatever was drafted and taken back."""
    model, draft = make_gpt(context=64), make_gpt(context=64, num_layers=1)
    sampling = Sampling(temperature=2.0)
    request = make_request(model, [1, 2, 3], 50, sampling=sampling, seed=0)
    tally = Tally()
    decoder = SpeculativeDecoder(model, draft, request, 4, tally)
    while not request.done:
        decoder.step()
        text = [1, 2, 3, *request.tokens]
        both = (decoder._model, decoder._unread), (decoder._draft, decoder._draft_unread)
        for window, unread in both:
            assert text == window._readings[0].tokens + unread
            lengths = [cache.uniform_length for cache in window.caches]
            assert lengths == window.held * len(window.caches)
    assert 10 < tally.accepted < tally.drafted - 10


def test_settings_that_leave_one_token_give_the_models_own():
    model, draft = make_gpt(), make_gpt(num_layers=1)
    sampling = Sampling(top_k=1, repetition_penalty=1.7)
    got = list(speculative_tokens(model, draft, [1, 2], 60, sampling=sampling, seed=0))
    assert got == list(generate_tokens(model, [1, 2], 60, sampling=sampling, seed=3))


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
                accepted, following = verify(p[: drafted + 1], list(q), drafts, [*numbers, last])
                share[token if accepted else following] += q[0, token] / len(grid) ** 2
    torch.testing.assert_close(share, p[0], atol=1e-12, rtol=0)


def test_verification_keeps_what_can_be_kept():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    q = [torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])]
    assert verify(p, q, [0, 0], [0.99, 0.99, 0.5]) == (2, 1)
    assert verify(p, q, [1, 1], [0.99, 0.0, 0.5]) == (1, 0)
    # Where nothing of p is left over q, p itself serves.
    certain = torch.tensor([0.0, 1.0])
    assert verify(torch.stack([certain, certain]), [certain], [0], [0.0, 0.5]) == (0, 1)


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


def test_wrong_pairs_are_named():
    with pytest.raises(ValueError, match="the model's vocabulary of 20 tokens, got 19"):
        next(speculative_tokens(make_gpt(), make_gpt(19), [1], 1))
    with pytest.raises(ValueError, match="drafts must be at least 1, got 0"):
        next(speculative_tokens(make_gpt(), make_gpt(), [1], 1, drafts=0))
