"""Generation by a cache, of one text and of batches, with and without a full context."""

import numpy as np
import pytest
import torch
from small_gpt import make_gpt

from fastattn.generation.generate import (
    generate_batch,
    generate_text,
    generate_texts,
    generate_tokens,
    unpad,
)
from fastattn.generation.request import Tally
from fastattn.generation.search import beam_search, beam_texts
from fastattn.generation.text import TextStream, text_until_stop
from fastattn.models.gpt import GPT
from fastattn.models.sampling import Sampling
from fastattn.models.stack import evaluating
from fastattn.training.tokenizers import CharacterTokenizer, Tokenizer, train_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


GREEDY = Sampling(greedy=True)
ABC = CharacterTokenizer("abc")


def make_prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(20, (length,)).tolist() for length in lengths]


@torch.no_grad()
def greedy_by_full_forward(
    model: GPT, prompt: list[int], count: int, past_context: str
) -> list[int]:
    """Generate greedily without a cache, by the documented rules for the window."""
    context = model.config.context_length
    tokens, window = list(prompt), min(len(prompt), context)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens[-window:]]))[0][0, -1].argmax()))
        if window < context:
            window += 1
        elif past_context == "restart":
            window = context // 2
    return tokens[len(prompt) :]


@pytest.mark.parametrize("past_context", ["restart", "crop"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_cached_generation_equals_full_forwards_past_the_context(positions, past_context):
    model, prompts = make_gpt(positions=positions), make_prompts(1, 11, 12, 30)
    expected = [greedy_by_full_forward(model, x, 40, past_context) for x in prompts]
    options = {"sampling": GREEDY, "past_context": past_context}
    assert [list(generate_tokens(model, x, 40, **options)) for x in prompts] == expected
    assert generate_batch(model, prompts, 40, **options) == expected
    assert all(len(set(tokens)) > 1 for tokens in expected)


@torch.no_grad()
def test_a_repetition_penalty_counts_the_prompt_and_what_follows():
    model = make_gpt(context=64)
    sampling = Sampling(greedy=True, repetition_penalty=1.5)
    tokens = [1, 2, 3]
    for _ in range(40):
        scores = model(torch.tensor([tokens]))[0][0, -1]
        for token in set(tokens):
            scores[token] *= 1.5 if scores[token] < 0 else 1 / 1.5
        tokens.append(int(scores.argmax()))
    assert list(generate_tokens(model, [1, 2, 3], 40, sampling=sampling)) == tokens[3:]


WAYS = {
    "tokens": lambda model, x: list(generate_tokens(model, x, 20, seed=2**64)),
    "array": lambda model, x: generate_batch(model, np.tile(x, (2, 1)), 20, seed=0),
    "batch": lambda model, x: generate_batch(model, [x, x], 20, seed=0),
    "beams": lambda model, x: beam_search(model, x, 20, beams=2),
    "idx": lambda model, x: model.generate(torch.as_tensor(x, device="cpu")[None], 20, top_k=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_mode_default_device_and_kind_of_prompt_change_nothing(way):
    model, ids, call = make_gpt(dropout=0.5), torch.tensor([1, 2, 3]), WAYS[way]
    expected = str(call(model, [1, 2, 3]))
    assert str(call(model, ids)) == str(call(model, ids.numpy())) == expected
    model.train().norm.eval()
    next(generate_tokens(model, [1], 5))  # and no more
    with torch.device("meta"):
        assert str(call(model, [1, 2, 3])) == expected
    assert model.training and model.blocks[0].training and not model.norm.training
    first, second = evaluating(model), evaluating(model)  # of two threads
    first.__enter__(), second.__enter__(), first.__exit__(None, None, None)
    assert not model.training
    second.__exit__(None, None, None)
    assert model.training and not model.norm.training


def test_tokens_come_one_by_one():
    """Each is read once while the context lasts."""
    model = make_gpt(context=64)
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    stream = generate_tokens(model, [1, 2, 3], 1000)
    assert read == []
    for i in range(50):
        next(stream)
        assert read == [3] + [1] * i
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    stream.close()
    assert torch.is_grad_enabled()


def test_an_empty_prompt_starts_behind_a_line_break():
    tokenizer = CharacterTokenizer("\t\nabc")
    model = make_gpt(vocab_size=5)
    empty, line = (list(generate_text(model, tokenizer, p, 20, seed=0)) for p in ("", "\n"))
    assert empty == line
    assert len("".join(empty)) == 20
    assert len("".join(generate_text(make_gpt(vocab_size=3), ABC, "", 20, seed=0))) == 20, "none"


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "window": 5}], ids=str)
def test_rows_of_a_batch_get_what_they_get_alone(changes):
    """With prompts up to past the context, counts, settings and ends of their own."""
    model = make_gpt(**changes, num_kv_heads=1)
    prompts, counts = make_prompts(3, 12, 1, 30, 11), [40, 7, 25, 30, 0]
    settings = [
        GREEDY,
        Sampling(temperature=0.5),
        Sampling(repetition_penalty=2.0),
        Sampling(repetition_penalty=2.0, top_k=4),
        GREEDY,
    ]
    got = generate_batch(model, prompts, counts, sampling=settings, seed=7, end_token=2)
    alone = [
        list(generate_tokens(model, prompt, count, sampling=setting, seed=7 + i, end_token=2))
        for i, (prompt, count, setting) in enumerate(zip(prompts, counts, settings, strict=True))
    ]
    assert got == alone
    assert any(0 < len(tokens) < count for tokens, count in zip(got, counts, strict=True))
    assert any(len(tokens) > 12 for tokens in got)


def test_padding_on_either_side_is_left_out():
    tokens = torch.tensor([[19, 19, 3, 4], [5, 6, 7, 19]])
    mask = tokens != 19
    assert unpad(tokens, mask) == [[3, 4], [5, 6, 7]]


def test_an_end_token_ends_the_text_and_is_not_part_of_it():
    model = make_gpt()
    tokens = list(generate_tokens(model, [1], 60, sampling=GREEDY))
    end = tokens[7]
    got = list(generate_tokens(model, [1], 60, sampling=GREEDY, end_token=end))
    assert got == tokens[: tokens.index(end)]
    # Of several the first that comes.
    for ends in ([tokens[11], end], (end,), {end, tokens[30]}):
        got = list(generate_tokens(model, [1], 60, sampling=GREEDY, end_token=ends))
        assert got == tokens[: min(map(tokens.index, ends))]
    assert len(list(generate_tokens(model, [1], 60, sampling=GREEDY, end_token=[]))) == 60


@pytest.fixture
def bpe() -> Tokenizer:
    """Tokens of several characters, beside all bytes."""
    text = "the end of the stop, the stopping ENDs. aé漢🎉 " * 5
    return train_tokenizer("bpe", text, vocab_size=300)


STOPS = [
    *(["stopping", "top"], ["xx"], ["the s"], ["end", "the"]),
    *(["stopp", "st"], ["op", "stop"], ["é"], ["end", "nd o"]),
]


@pytest.mark.parametrize("stop", STOPS, ids="|".join)
@pytest.mark.parametrize("cut", ["bytes", "tokens"])
def test_stop_strings_end_the_text_wherever_tokens_end(stop, cut, bpe):
    text = "at é the stopping end of the stop, é 🎉"
    tokens = [t for c in text for t in bpe.encode(c)] if cut == "bytes" else bpe.encode(text)
    assert bpe.decode(tokens) == text
    # The stop string that is complete first, found character by character.
    complete = [n for n in range(len(text) + 1) if text[:n].endswith(tuple(stop))]
    longest = max(
        (s for s in stop if complete and text[: complete[0]].endswith(s)), key=len, default=""
    )
    expected = text[: complete[0] - len(longest)] if complete else text
    assert text_until_stop(bpe, tokens, stop) == expected

    stream, shown = TextStream(bpe, stop), ""
    for token in tokens:
        shown += stream.feed(token)
        assert expected.startswith(shown)
    assert stream.stopped == bool(complete)
    assert shown + stream.finish() == expected
    assert stream.finish() == ""


def test_text_is_held_back_no_longer_than_it_must_be():
    tokenizer = CharacterTokenizer("abc")
    stream = TextStream(tokenizer, ["abac"])
    pieces = [stream.feed(tokenizer.encode(c)[0]) for c in "cabababac"]
    assert pieces == ["c", "", "", "", "ab", "", "ab", "", ""]
    assert stream.stopped


def test_texts_stop_each_for_itself():
    tokenizer = CharacterTokenizer("abcdefghijklmnopqrst")
    model = make_gpt()
    free = [
        "".join(generate_text(model, tokenizer, prompt, 40, sampling=GREEDY))
        for prompt in ("a", "bcd")
    ]
    stop = free[1][9:11]
    tally, texts = Tally(), ["", ""]
    for row, piece in generate_texts(
        model, tokenizer, ["a", "bcd"], [40, 40], sampling=GREEDY, stop=[stop], tally=tally
    ):
        texts[row] += piece
    assert texts == [text.partition(stop)[0] for text in free]
    (end,) = tokenizer.encode(free[1][9])
    ended = generate_text(model, tokenizer, "bcd", 40, sampling=GREEDY, end_token=end)
    assert "".join(ended) == free[1].partition(free[1][9])[0]
    assert len(texts[1]) < 10
    # The two characters of the stop string count as tokens, though not as text.
    assert tally.tokens == sum(
        len(text) + 2 * (stop in whole) for text, whole in zip(texts, free, strict=True)
    )


def test_words_join_those_of_the_prompt():
    words = train_tokenizer("word", "one two three four five")
    model, prompt = make_gpt(words.vocab_size), words.encode("one")
    tokens = list(generate_tokens(model, prompt, 5, sampling=GREEDY))
    text = "".join(generate_text(model, words, "one", 5, sampling=GREEDY))
    assert "one" + text == words.decode(prompt + tokens)
    assert beam_texts(model, words, "one", 5, beams=1)[0][0] == text
