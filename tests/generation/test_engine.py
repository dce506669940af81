"""Continuous batching gives every request what it gets alone."""

import math
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


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_small_pool_makes_requests_wait_and_changes_nothing(page_size):
    model = make_gpt()
    wishes = make_wishes(12, context=12, seed=2)
    engine = Engine(model, num_pages=max(2, 20 // page_size), page_size=page_size, max_batch=6)
    assert serve(engine, wishes) == [alone(model, wish) for wish in wishes]
    # A page of 16 tokens is a whole context: nobody ever needs a second one.
    assert (engine.preemptions > 0) == (page_size < 16)


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


def test_a_common_prefix_is_read_once():
    model = make_gpt(context=40)
    prefix = torch.randint(20, (17,)).tolist()
    wishes = [
        {"prompt": [*prefix, i], "count": 8, "seed": i, **SETTINGS[i % 3]} for i in range(5)
    ] + [{"prompt": prefix[:9], "count": 5}, {"prompt": prefix, "count": 5, "seed": 1}]
    wishes[5]["seed"] = 0
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    engine = Engine(model, num_pages=40, page_size=4)
    requests = [engine.submit(**wish) for wish in wishes]
    list(engine.run())
    got = [request.tokens for request in requests]
    new = sum(wish["count"] - 1 for wish in wishes)
    # The last token of a prompt is read by everyone: of prefix[:9] eight are shared, of it all 16.
    assert engine.shared_tokens == 4 * 17 + 8 + 16
    assert sum(read) == sum(len(wish["prompt"]) for wish in wishes) + new - engine.shared_tokens
    assert got == [alone(model, wish) for wish in wishes]


def test_a_request_can_be_cancelled_at_any_time():
    model = make_gpt()
    engine = Engine(model, num_pages=20, page_size=4, max_batch=2)
    wish = {"count": 10, "sampling": Sampling(greedy=True)}
    running, other, waiting = (engine.submit([token], **wish) for token in (1, 2, 3))
    for _ in range(4):
        engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, len(engine.cache.rows)) == (1, 0, 2)  # one is kept
    list(engine.run())
    engine.cancel(other)
    assert [len(r.tokens) for r in (running, other, waiting)] == [4, 10, 0]
    assert other.tokens == alone(model, {"prompt": [2], **wish})
    assert running.tokens == alone(model, {"prompt": [1], **wish})[:4]
    engine.forget()
    assert engine.cache.rows == []


def test_a_request_for_nothing_is_done_at_once():
    engine = Engine(make_gpt(), num_pages=1)
    assert engine.submit([1], 0).done
    assert not engine.busy
    assert engine.step() == []


@pytest.mark.parametrize("options", [{}, {"kv_latent_dim": 6, "positions": "rotary"}])
def test_codes_in_the_cache_are_served(options):
    model = make_gpt(**options)
    engine = Engine(model, num_pages=20, page_size=4, quantize="int8")
    assert engine.cache.k.dtype == torch.int8
    assert [len(tokens) for tokens in serve(engine, make_wishes(3, context=12))] == [
        len(alone(model, wish)) for wish in make_wishes(3, context=12)
    ]


def test_wrong_requests_are_named_and_leave_the_engine_as_it_was():
    engine = Engine(make_gpt(), num_pages=2, page_size=4)
    with pytest.raises(ValueError, match="num_pages must be at least 3 for 5 tokens and 5 more"):
        engine.submit([1] * 5, 5)
    with pytest.raises(ValueError, match="prompt must hold at least one token, got none"):
        engine.submit([], 5)
    assert not engine.busy
    request = engine.submit([1] * 5, 4)
    list(engine.run())
    assert len(request.tokens) == 4


def test_scores_that_are_not_finite_are_named():
    model = make_gpt()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    engine = Engine(model, num_pages=4)
    engine.submit([1], 2)
    with pytest.raises(FloatingPointError, match="scores are not finite"):
        engine.step()
