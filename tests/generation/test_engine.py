"""Continuous batching gives every request what it gets alone."""

import random

import pytest
import torch
from small_gpt import make_gpt

from fastattn.generation.engine import Engine
from fastattn.generation.generate import generate_tokens
from fastattn.models.gpt import GPT
from fastattn.models.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SETTINGS = [
    {"sampling": Sampling(greedy=True)},
    {"sampling": Sampling(temperature=0.7, top_k=6)},
    {"sampling": Sampling(min_p=0.05, repetition_penalty=1.5)},
    {"sampling": Sampling(top_p=0.9), "end_token": 3},
]


def make_wishes(number: int, context: int, seed: int = 0) -> list[dict]:
    """Arguments of `submit`, many kinds mixed."""
    source = random.Random(seed)
    return [
        {
            "prompt": [source.randrange(20) for _ in range(source.randint(1, 2 * context))],
            "count": source.randint(1, 2 * context),
            "seed": i,
            **SETTINGS[i % len(SETTINGS)],
        }
        for i in range(number)
    ]


def alone(model: GPT, wish: dict) -> list[int]:
    return list(generate_tokens(model, **wish))


def serve(engine: Engine, wishes: list[dict], seed: int = 1) -> list[list[int]]:
    """Submits at random moments; returns what each request got, having checked the events."""
    source = random.Random(seed)
    waiting, requests, streams = list(wishes), [], {}
    while waiting or engine.busy:
        while waiting and source.random() < 0.4:
            requests.append(engine.submit(**waiting.pop(0)))
            streams[requests[-1]] = []
        for request, token in engine.step():
            streams[request].append(token)
    assert all(request.done for request in requests)
    assert [streams[request] for request in requests] == [r.tokens for r in requests]
    engine.forget()
    assert engine.cache.rows == []
    assert engine.cache.free_pages == engine.cache.k.shape[1]
    return [request.tokens for request in requests]


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned", "num_kv_heads": 1},
        {"positions": "rotary", "num_kv_heads": 1},
        {"positions": "rotary", "kv_latent_dim": 6, "window": 7, "sinks": True},
    ],
)
def test_requests_that_come_at_random_get_what_they_get_alone(options):
    model = make_gpt(**options)
    wishes = make_wishes(16, context=12)
    engine = Engine(model, num_pages=64, page_size=4, max_batch=5)
    assert serve(engine, wishes) == [alone(model, wish) for wish in wishes]
    assert engine.preemptions == 0


def test_who_had_to_wait_again_goes_before_who_came_later():
    """Each comes to three pages of the four; the second one, being later, makes way."""
    engine = Engine(make_gpt(), num_pages=4, page_size=2, max_batch=2)
    first, second, third = (engine.submit([token, token], 5) for token in (1, 2, 3))
    while not engine.preemptions:
        assert engine.step()
    assert not third.tokens
    assert 0 < len(second.tokens) < 5
    events = [request for request, _ in engine.run() if request is not first]
    assert events[0] is second
    assert len(first.tokens) == len(second.tokens) == len(third.tokens) == 5


@pytest.mark.parametrize("options", [{}, {"kv_latent_dim": 6, "positions": "rotary"}])
def test_codes_in_the_cache_are_served(options):
    model = make_gpt(**options)
    engine = Engine(model, num_pages=20, page_size=4, quantize="int8")
    assert engine.cache.k.dtype == torch.int8
    assert [len(tokens) for tokens in serve(engine, make_wishes(3, context=12))] == [
        len(alone(model, wish)) for wish in make_wishes(3, context=12)
    ]


def test_a_refused_request_leaves_the_engine_as_it_was():
    engine = Engine(make_gpt(), num_pages=2, page_size=4)
    with pytest.raises(ValueError, match="num_pages must be at least 3 for 5 tokens and 5 more"):
        engine.submit([1] * 5, 5)
    assert not engine.busy
    assert engine.submit([1], 0).done and not engine.busy
    assert engine.step() == []
    request = engine.submit([1] * 5, 4)
    list(engine.run())
    assert len(request.tokens) == 4
