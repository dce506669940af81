"""Continuous batching: every request gets what it gets alone, however steps are made up."""

import gc
import math
import random
from typing import Any

import pytest
import torch
from small_gpt import make_gpt

from fastattn import attention_paged
from fastattn.generation import Engine, Sampling, generate_tokens, paged
from fastattn.generation import engine as engine_module
from fastattn.generation.graph import PagedGraphs
from fastattn.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

GREEDY = Sampling(greedy=True)
KINDS = [
    {"sampling": GREEDY},
    {"sampling": Sampling(temperature=0.7, top_k=6)},
    {"sampling": Sampling(min_p=0.05, repetition_penalty=1.5)},
    {"sampling": Sampling(top_p=0.9), "end_token": [3, 11]},
]
LATENT = {"positions": "rotary", "kv_latent_dim": 6}
# Models, and the seeds of the schedules that each of them serves.
SCHEDULES = [
    ({"num_kv_heads": 1}, range(20)),
    ({"num_kv_heads": 1, "positions": "rotary"}, range(20, 35)),
    ({**LATENT, "window": 7, "sinks": True}, range(35, 50)),
]


def alone(model: GPT, wish: dict[str, Any]) -> list[int]:
    return list(generate_tokens(model, **wish))


def free_of_requests(engine: Engine) -> bool:
    """Whether all pages are back, but those that are kept for prompts to come."""
    metrics = engine.metrics()
    engine.forget()
    pages = engine.cache.k.shape[1]
    forgotten = not engine._schedule.kept._by_first_page
    return metrics.pages_in_use == 0 and engine.cache.free_pages == pages and forgotten


def poison(engine: Engine) -> None:
    """Make what no row holds NaN: a request that read another's pages would get no number."""
    held = {page for row in engine.cache.rows for page in engine.cache.pages(row)}
    free = [page for page in range(engine.cache.k.shape[1]) if page not in held]
    for x in (engine.cache.k, engine.cache.v):
        x[:, free] = torch.nan


def make_wishes(model: GPT) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Requests of which many begin alike, and what each of them gets alone."""
    source = random.Random(5)
    beginnings = [[source.randrange(20) for _ in range(n)] for n in (9, 16)]
    wishes = []
    for i in range(14):
        prompt = [source.randrange(20) for _ in range(source.randint(1, 14))]
        if i % 3:
            prompt = beginnings[i % 2][: source.randint(4, 16)] + prompt[:5]
        wishes.append({"prompt": prompt, "count": source.randint(1, 20), "seed": i, **KINDS[i % 4]})
    return wishes, [alone(model, wish) for wish in wishes]


@pytest.mark.parametrize(("options", "seeds"), SCHEDULES, ids=["learned", "rotary", "latent"])
def test_random_schedules_give_what_each_request_gets_alone(options, seeds):
    model = make_gpt(context=24, **options)
    wishes, expected = make_wishes(model)
    preempted = shared = cancelled = 0
    for seed in seeds:
        source = random.Random(seed)
        page_size, max_batch = source.choice([1, 3, 4, 8]), source.randint(1, 5)
        engine = Engine(
            model,
            num_pages=-(-24 // page_size) * source.choice([1, 1, 2, 3]) + source.randint(0, 3),
            page_size=page_size,
            max_batch=max_batch,
            max_step_tokens=source.choice([None, max_batch, max_batch + 3, 16]),
            kept_rows=source.choice([None, 0, 1]),
        )
        queue = [source.randrange(len(wishes)) for _ in range(7)]
        requests, left = [], set()
        while queue or engine.busy:
            while queue and source.random() < 0.4:
                i = queue.pop()
                requests.append((i, engine.submit(**wishes[i], priority=source.choice([0, 0, 1]))))
            if requests and source.random() < 0.05:
                left.add(len(requests) - 1)
                engine.cancel(requests[-1][1])
            poison(engine)
            engine.step()
        for n, (i, request) in enumerate(requests):
            got = request.tokens
            assert request.done
            assert got == expected[i][: len(got)], f"seed {seed}, request {n}"
            assert n in left or len(got) == len(expected[i])
        preempted, shared = preempted + engine.preemptions, shared + engine.shared_tokens
        cancelled += len(left)
        assert free_of_requests(engine)
    assert min(preempted, shared, cancelled) > 0


def test_no_step_reads_more_than_its_budget_and_who_writes_is_not_held_up():
    model = make_gpt(context=64)
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    engine = Engine(model, num_pages=64, page_size=4, max_batch=3, max_step_tokens=8)
    writer = engine.submit([1, 2], 20, sampling=GREEDY)
    engine.step()
    reader = engine.submit(list(range(20)) + list(range(19)), 2, sampling=GREEDY)
    for step in range(1, 7):
        engine.step()
        assert len(writer.tokens) == 1 + step
        assert len(reader.tokens) == (step == 6)  # 39 tokens, 7 a step
    assert read == [2, *[8] * 5, 1 + 39 - 5 * 7]
    list(engine.run())
    assert writer.tokens == alone(model, {"prompt": [1, 2], "count": 20, "sampling": GREEDY})


def test_what_a_finished_request_has_computed_is_read_by_the_next():
    model = make_gpt(context=64)
    engine = Engine(model, num_pages=32, page_size=4)
    text = [i % 20 for i in range(18)]
    first = engine.submit(text, 3, sampling=GREEDY)
    list(engine.run())
    assert engine.metrics().pages_kept == 5  # of 20 tokens, the last of which nobody read
    second = engine.submit(text + first.tokens, 2, sampling=GREEDY)
    list(engine.run())
    assert engine.shared_tokens == 20
    wish = {"prompt": text, "count": 5, "sampling": GREEDY}
    assert first.tokens + second.tokens == alone(model, wish)


def test_pages_not_used_for_longest_make_way_page_by_page():
    engine = Engine(make_gpt(context=32), num_pages=8, page_size=4, max_batch=1)
    texts = [[i] * 12 for i in range(2)]
    for text in texts:
        engine.submit(text, 1, sampling=GREEDY)
    list(engine.run())
    assert engine.metrics().pages_kept == 6
    engine.submit([*texts[0], 9], 1, sampling=GREEDY)  # used again: the other is the oldest
    list(engine.run())
    assert engine.shared_tokens == 12
    engine.submit([5] * 16, 1, sampling=GREEDY)
    list(engine.run())
    assert engine.metrics().pages_kept == 3 + 4 + 1
    engine.submit([*texts[1], 9], 1, sampling=GREEDY)
    list(engine.run())
    assert engine.shared_tokens == 12 + 4


def test_a_prompt_waits_for_what_another_is_about_to_compute():
    model = make_gpt(context=64)
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    engine = Engine(model, num_pages=64, page_size=4, max_step_tokens=10)
    text = [i % 20 for i in range(25)]
    requests = [engine.submit([*text, i], 1, sampling=GREEDY) for i in range(4)]
    list(engine.run())
    assert read == [10, 10, 6, 3 * 2] and engine.shared_tokens == 3 * 24
    assert all(len(request.tokens) == 1 for request in requests)


def test_a_higher_priority_goes_first_and_sends_a_lower_one_away():
    model = make_gpt()
    engine = Engine(model, num_pages=12, page_size=1, max_batch=2)
    low = engine.submit([1, 2, 3], 6, sampling=GREEDY)
    engine.step()
    later, high = engine.submit([4], 2, sampling=GREEDY), engine.submit([5] * 8, 5, priority=1)
    engine.step()
    assert (len(high.tokens), len(later.tokens), engine.preemptions) == (1, 0, 1)
    events = [request for request, _ in engine.run()]
    assert events.index(low) < events.index(later)
    assert low.tokens == alone(model, {"prompt": [1, 2, 3], "count": 6, "sampling": GREEDY})


@pytest.mark.parametrize("priority", [1, 3])
def test_steady_requests_of_higher_priority_starve_none(priority):
    model = make_gpt()
    engine = Engine(model, num_pages=20, page_size=4, max_batch=1)
    low, steps = engine.submit([1, 2, 3], 8, sampling=GREEDY), 0
    while not low.done and steps < 200:
        engine.submit([4], 1, priority=priority)  # as many as there are steps
        engine.step()
        steps += 1
    assert 16 * priority < steps < 16 * priority + 12
    assert low.tokens == alone(model, {"prompt": [1, 2, 3], "count": 8, "sampling": GREEDY})


@pytest.mark.parametrize("error", [FloatingPointError, RuntimeError])
def test_a_step_that_fails_gives_pages_back_and_can_be_done_again(error, monkeypatch):
    model = make_gpt()
    engine = Engine(model, num_pages=20, page_size=4)
    requests = [engine.submit([i, 2, 3], 5, sampling=GREEDY) for i in range(3)]
    engine.step()
    with monkeypatch.context() as patch:

        def failing(tokens: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            if error is RuntimeError:
                raise RuntimeError("out of memory")
            return torch.full((len(tokens), 1, 20), torch.nan), None

        patch.setattr(engine.model, "forward", failing)
        with pytest.raises(error):
            engine.step()
    assert engine.metrics().pages_in_use == 0 and engine.cache.rows == []
    engine.cancel(requests[0])
    list(engine.run())
    for i, request in enumerate(requests[1:], 1):
        assert request.tokens == alone(model, {"prompt": [i, 2, 3], "count": 5, "sampling": GREEDY})
    assert len(requests[0].tokens) == 1 and free_of_requests(engine)


def test_memory_does_not_grow_with_requests(monkeypatch):
    engine = Engine(make_gpt(num_layers=1), num_pages=16, page_size=4, max_batch=8, kept_rows=3)
    scores = torch.zeros(8, 1, 20)
    monkeypatch.setattr(engine.model, "forward", lambda _, rows, **__: (scores[: len(rows)],))
    source, used = random.Random(0), []
    for n in range(5000):
        engine.submit([source.randrange(20) for _ in range(source.randint(1, 9))], 2, seed=n)
        engine.step()
        if n in (2000, 4999):
            gc.collect()
            used.append(len(gc.get_objects()))
    list(engine.run())
    assert used[1] - used[0] < 500, used
    assert engine.metrics().new_tokens == 2 * 5000
    assert free_of_requests(engine)


def test_one_request_is_streamed_while_others_are_served():
    engine = Engine(make_gpt(), num_pages=20, page_size=4)
    other, request = (engine.submit([i], 6, sampling=GREEDY) for i in (1, 2))
    assert list(engine.stream(request)) == request.tokens
    assert len(other.tokens) == 6


def test_metrics_count_what_was_done():
    engine = Engine(make_gpt(), num_pages=20, page_size=4, max_batch=1)
    assert engine.metrics().first_token_seconds is None
    assert math.isnan(engine.metrics().tokens_per_second)
    for i in (1, 2):
        engine.submit([i, i, i, i], 3, sampling=GREEDY)
    engine.step()
    actual = engine.metrics()
    assert (actual.steps, actual.read_tokens, actual.new_tokens) == (1, 4, 1)
    assert (actual.running, actual.waiting, actual.pages_in_use) == (1, 1, 1)
    list(engine.run())
    actual = engine.metrics()
    assert (actual.read_tokens, actual.new_tokens, actual.running) == (12, 6, 0)
    assert actual.tokens_per_second > 0 and actual.first_token_seconds > 0


@pytest.mark.parametrize(("quantize", "replayed"), [(None, False), ("int8", False), (None, True)])
def test_pages_that_requests_share_are_read_once_where_that_is_fewer_bytes(
    quantize, replayed, monkeypatch
):
    """Keys that attention reads, by the arguments it gets; the tokens stay what they are alone.

    Replayed steps have rows without tokens too.
    """
    model = make_gpt(context=64, num_kv_heads=1)
    prefix = [i % 20 for i in range(32)]
    read: list[tuple[int, int]] = []

    def counted(q, view, offsets, shared=None, **options):
        new = offsets.diff() > 0
        together = apart = int(view.of_batch(view.lengths)[new].sum())
        if shared is not None:
            together += int(shared.lengths.sum()) - int(view.of_batch(shared.starts)[new].sum())
        read.append((together, apart))
        o = attention_paged(q, view, offsets, shared=shared, **options)
        if shared is not None:
            expected = attention_paged(q, view, offsets, **options)
            torch.testing.assert_close(o[: offsets[-1]], expected[: offsets[-1]])
        return o

    monkeypatch.setattr(paged, "attention_paged", counted)
    engine = Engine(model, num_pages=64, page_size=4, quantize=quantize)
    assert not engine._shares, "torch's formula would take longer on a CPU"
    engine._shares = True
    if replayed:
        engine._graphs = PagedGraphs(model, engine.cache, 8, record=lambda step: step)
    wishes = [{"prompt": [*prefix, i], "count": 4, "sampling": GREEDY} for i in range(5)]
    others = [{"prompt": x, "count": 4, "sampling": GREEDY} for x in ([5, *prefix], prefix[:17])]
    for _ in range(2):  # of a running request, then of one that is kept
        requests = [engine.submit(**wish) for wish in (wishes[0], *others, *wishes[1:])]
        list(engine.run())
        if quantize is None:
            expected = [alone(model, wish) for wish in (wishes[0], *others, *wishes[1:])]
            assert [request.tokens for request in requests] == expected
    # 32 tokens of five requests, not 16 of six; of four, once the first one is done.
    assert {apart - together for together, apart in read} == {0, 3 * 32, 4 * 32}
    assert sum(a < b for a, b in read) >= 8 * model.config.num_layers


def test_scores_of_a_batch_invariant_model_are_those_of_training(monkeypatch):
    """To the bit, beside others, in chunks and from kept pages, if linear layers go row by row."""
    linear, choose = torch.nn.functional.linear, engine_module.choose_next
    scores: dict[Any, list[torch.Tensor]] = {}

    def by_rows(x, *weights):
        rows = [linear(row[None], *weights) for row in x.flatten(0, -2)]
        return torch.cat(rows).unflatten(0, x.shape[:-1])

    def kept(logits, requests):
        for request, row in zip(requests, logits, strict=True):
            scores.setdefault(request, []).append(row.clone())
        return choose(logits, requests)

    monkeypatch.setattr(torch.nn.functional, "linear", by_rows)
    monkeypatch.setattr(engine_module, "choose_next", kept)
    model = make_gpt(context=64, num_kv_heads=1, positions="rotary", batch_invariant=True)
    engine = Engine(model, num_pages=64, page_size=4, max_step_tokens=9)
    engine._shares = True
    prefix = [i % 20 for i in range(30)]
    for prompt in ([*prefix, 1], [3], [*prefix, 2], [*prefix, 7, 8], [4] * 20):
        engine.submit(prompt, 5, sampling=GREEDY)
    list(engine.run())
    assert len(scores) == 5 and engine.shared_tokens > 0
    for request, rows in scores.items():
        with torch.no_grad():
            trained, _ = model(torch.tensor([request.prompt + request.tokens[:-1]]))
        assert torch.equal(torch.stack(rows), trained[0, len(request.prompt) - 1 :])


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


@pytest.mark.parametrize("options", [{}, LATENT])
def test_codes_in_the_cache_are_served(options):
    engine = Engine(make_gpt(**options), num_pages=20, page_size=4, quantize="int8")
    assert engine.cache.k.dtype == torch.int8
    requests = [engine.submit([i, 2, 3], 9 * i, sampling=GREEDY) for i in range(1, 4)]
    list(engine.run())
    assert [len(request.tokens) for request in requests] == [9, 18, 27]
    assert free_of_requests(engine)


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


def test_a_cancelled_request_leaves_at_once_whether_it_runs_or_waits():
    engine = Engine(make_gpt(), num_pages=20, page_size=4, max_batch=2)
    running, other, waiting = (engine.submit([token], 10, sampling=GREEDY) for token in (1, 2, 3))
    for _ in range(4):
        engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, len(engine.cache.rows)) == (1, 0, 2)  # one is kept
    list(engine.run())
    engine.cancel(other)
    assert [len(request.tokens) for request in (running, other, waiting)] == [4, 10, 0]
