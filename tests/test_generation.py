"""Sampling and generation, with and without a full cache."""

import itertools
import math

import pytest
import torch

from fastattn.generation.generate import generate_text, generate_tokens
from fastattn.generation.sampling import Sampling
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.tokenizer import BPETokenizer, CharacterTokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_model(vocab_size=20, context=12, **changes) -> GPT:
    sizes = {"context_length": context, "num_layers": 2, "num_heads": 2, "embed_dim": 16}
    model = GPT(GPTConfig(vocab_size, **{**sizes, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@torch.no_grad()
def greedy_by_full_forward(model: GPT, prompt: list[int], count: int) -> list[int]:
    """What greedy generation gives without a cache, by the documented rule for the window."""
    context = model.config.context_length
    tokens, window = list(prompt), min(len(prompt), context)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens[-window:]]))[0, -1].argmax()))
        window = context // 2 if window == context else window + 1
    return tokens[len(prompt) :]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("prompt", [1, 5, 11, 12, 30])
def test_cached_generation_equals_full_forwards_past_the_context(positions, prompt):
    model = make_model(positions=positions)
    tokens = torch.randint(20, (prompt,)).tolist()
    got = list(generate_tokens(model, tokens, 40, sampling=Sampling(greedy=True)))
    assert got == greedy_by_full_forward(model, tokens, 40)
    assert len(set(got)) > 1


def test_a_context_of_one_token_goes_on():
    model = make_model(context=1)
    got = list(generate_tokens(model, [3, 4], 5, sampling=Sampling(greedy=True)))
    tokens = [4]
    with torch.no_grad():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens[-1:]]))[0, -1].argmax()))
    assert got == tokens[1:]


def test_a_seed_repeats_the_tokens():
    model = make_model()
    runs = [list(generate_tokens(model, [1], 30, seed=seed)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(1)
    free = list(generate_tokens(model, [1], 30))
    torch.manual_seed(1)
    assert list(generate_tokens(model, [1], 30)) == free


def test_tokens_come_one_by_one():
    model = make_model()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    stream = generate_tokens(model, [1, 2], 10)
    assert calls == []
    next(stream)
    assert calls == [1]
    next(stream)
    assert calls == [1, 1]


def test_the_callers_grad_mode_is_left_alone():
    stream = generate_tokens(make_model(), [1], 3)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_text_comes_in_whole_characters():
    tokenizer = BPETokenizer.train("aé漢🎉" * 5, 256)
    model = make_model(vocab_size=tokenizer.vocab_size)
    tokens = list(generate_tokens(model, tokenizer.encode("é"), 200, seed=0))
    pieces = list(generate_text(model, tokenizer, "é", 200, seed=0))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert all(pieces)
    assert len(pieces) > 10


def test_an_empty_prompt_starts_behind_a_line_break():
    tokenizer = CharacterTokenizer("\nabc")
    model = make_model(vocab_size=4)
    empty, line = (list(generate_text(model, tokenizer, p, 20, seed=0)) for p in ("", "\n"))
    assert empty == line
    assert len("".join(empty)) == 20


def test_an_empty_prompt_works_without_a_line_break_in_the_vocabulary():
    tokenizer = CharacterTokenizer("abc")
    text = "".join(generate_text(make_model(vocab_size=3), tokenizer, "", 20, seed=0))
    assert len(text) == 20


def test_wrong_requests_are_named():
    model = make_model()
    with pytest.raises(ValueError, match="prompt must hold at least one token, got none"):
        next(generate_tokens(model, [], 1))
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        next(generate_tokens(model, [1], -1))
    with pytest.raises(ValueError, match=r"character 'z' \(U\+007A\) does not occur"):
        next(generate_text(model, CharacterTokenizer("abc"), "az", 1))


def test_scores_that_are_not_finite_are_named():
    model = make_model()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="scores are not finite"):
        next(generate_tokens(model, [1], 1))


LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0], [0.0, -2.0, 5.0, 1.0, 1.0]])


def kept(sampling: Sampling) -> list[list[int]]:
    """Which tokens of each row of LOGITS are not ruled out."""
    return [row.isfinite().nonzero().flatten().tolist() for row in sampling.filter(LOGITS)]


def test_greedy_takes_the_first_highest():
    assert Sampling(greedy=True, top_k=1).choose(LOGITS).tolist() == [1, 2]


def test_temperature_divides_the_scores():
    assert torch.equal(Sampling(temperature=0.5).filter(LOGITS), LOGITS * 2)
    assert torch.equal(Sampling().filter(LOGITS.bfloat16()), LOGITS)


def test_top_k_keeps_the_highest_and_their_equals():
    assert kept(Sampling(top_k=1)) == [[1, 3], [2]]
    assert kept(Sampling(top_k=3)) == [[1, 2, 3], [2, 3, 4]]
    assert kept(Sampling(top_k=9)) == [[0, 1, 2, 3, 4]] * 2


def test_top_p_keeps_the_fewest_that_reach_it():
    probabilities = torch.tensor([[0.5, 0.05, 0.3, 0.15]])
    for top_p, expected in ((0.01, [0]), (0.49, [0]), (0.6, [0, 2]), (0.9, [0, 2, 3]), (1.0, None)):
        scores = Sampling(top_p=top_p).filter(probabilities.log())
        left = scores.isfinite()[0].nonzero().flatten().tolist()
        assert left == (expected or [0, 1, 2, 3])
        assert torch.equal(scores[0, left], probabilities.log()[0, left])


def test_top_p_counts_what_top_k_has_left():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    scores = Sampling(top_k=2, top_p=0.5).filter(probabilities.log())
    assert scores.isfinite().tolist() == [[True, False, False, False]]


def test_draws_follow_the_distribution():
    sampling = Sampling(temperature=2.0, top_k=3)
    logits = torch.tensor([0.0, 1.0, 2.0, -3.0]).expand(20_000, 4)
    drawn = sampling.choose(logits, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / 20_000
    expected = torch.tensor([0.0, 0.5, 1.0, -math.inf]).softmax(0)
    # Five standard deviations of a share.
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature must be positive and finite, got 0\.0; .* use greedy"),
        ({"temperature": math.nan}, "temperature must be positive and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be positive and finite, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1\.5"),
    ],
)
def test_wrong_sampling_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)


def test_generation_can_be_cut_short():
    stream = generate_tokens(make_model(), [1], 1000)
    assert len(list(itertools.islice(stream, 5))) == 5
    stream.close()
    assert torch.is_grad_enabled()
