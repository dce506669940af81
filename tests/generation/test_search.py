"""Beam search against one without a cache, and its rules."""

import pytest
import torch
from small_gpt import make_gpt

from fastattn.generation.search import beam_search, length_divisor
from fastattn.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

V = 4
PROMPT = [1, 3]


def make_model(**changes) -> GPT:
    return make_gpt(V, std=0.35, **changes).double()


@torch.no_grad()
def naive_search(model, count, beams, length_penalty, is_end) -> list[tuple[float, list[int]]]:
    """Beam search to the last token, every beam by full forward passes over its window.

    A token 0, what `is_end` says, and the last token end a beam.
    """
    context = model.config.context_length
    alive, ended, window = [(0.0, [])], [], len(PROMPT)
    for length in range(1, count + 1):
        longer = []
        for total, tokens in alive:
            text = torch.tensor([(PROMPT + tokens)[-window:]])
            scores = model(text)[0][0, -1].log_softmax(-1).tolist()
            longer += [(total + score, [*tokens, i]) for i, score in enumerate(scores)]
        alive = []
        for rank, (total, tokens) in enumerate(sorted(longer, reverse=True)):
            if tokens[-1] == 0 or is_end(tokens) or length == count:
                if rank < 2 * beams or len(alive) < beams:
                    score = total / length_divisor(length, length_penalty)
                    ended.append((score, tokens[:-1] if tokens[-1] == 0 else tokens))
            elif len(alive) < beams:
                alive.append((total, tokens))
        window = context // 2 if window == context else window + 1
    return sorted(ended, reverse=True)[:beams]


@pytest.mark.parametrize("beams", [1, 3, 40])
@pytest.mark.parametrize("length_penalty", [0.0, 3.0])
@pytest.mark.parametrize("context", [20, 5])
def test_few_beams_follow_the_rule(beams, length_penalty, context):
    model = make_gpt(8, context, std=0.3, positions="rotary").double()

    def is_end(tokens):
        return tokens[-1] != 7 and len(tokens) % 3 > 0

    for predicate in (is_end, None):
        keywords = {"beams": beams, "length_penalty": length_penalty}
        got = beam_search(model, PROMPT, 12, end_token=0, is_end=predicate, **keywords)
        wanted = naive_search(model, 12, is_end=predicate or (lambda tokens: False), **keywords)
        assert [beam.tokens for beam in got] == [tokens for _, tokens in wanted]
        assert [beam.score for beam in got] == pytest.approx([score for score, _ in wanted])


def test_the_search_ends_when_nothing_better_can_come():
    model = make_model()
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    best = beam_search(model, PROMPT, 1000, beams=2, end_token=0)
    assert len(best) == 2
    assert len(steps) < 30


def test_the_length_divisor_is_that_of_the_paper():
    assert length_divisor(1, 0.7) == 1.0
    assert length_divisor(7, 1.0) == 2.0
    assert length_divisor(7, 0.0) == 1.0
