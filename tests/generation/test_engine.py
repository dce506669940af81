"""examples/engine.py: every request gets what it gets alone, however steps are made up."""

import random
from typing import Any

import pytest
import torch
from engine import Engine, Request
from small_gpt import make_gpt

from fastattn.generation import Sampling, generate_tokens
from fastattn.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

GREEDY = Sampling(greedy=True)
KINDS = [
    {"sampling": GREEDY},
    {"sampling": Sampling(temperature=0.7, top_k=6)},
    {"sampling": Sampling(min_p=0.05, repetition_penalty=1.5)},
    {"sampling": Sampling(top_p=0.9), "end_token": [3, 11]},
]
LATENT = {"positions": "rotary", "kv_latent_dim": 6, "window": 7, "sinks": True}
# Models, and the seeds of the schedules that each of them serves.
SCHEDULES = {
    "learned": ({"num_kv_heads": 1}, range(8)),
    "rotary": ({"num_kv_heads": 1, "positions": "rotary"}, range(20, 26)),
    "latent": (LATENT, range(32, 37)),
    "in order": ({"positions": "content", "relative_distance": 3}, range(42, 46)),
}


class Watched(Engine):
    """An engine that preempts nobody who goes before another."""

    def _preempt(self, request: Request) -> None:
        assert not self.ordered or request.rank == max(r.rank for r in self.running)
        super()._preempt(request)

    ordered = True


def engine_of(model: GPT, pages: int = 20, size: int = 4, rows: int = 12, **how: Any) -> Watched:
    return Watched(model, model.new_paged_cache(pages, size, max_rows=rows), **how)


def submit(engine: Engine, prompt: list[int], count: int, end_token=(), **how: Any) -> Request:
    return engine.submit(prompt, count, end_tokens=end_token, **{"sampling": GREEDY, **how})


def alone(request: Request, engine: Engine) -> list[int]:
    return list(generate_tokens(engine.model, request.prompt, request.count, sampling=GREEDY))


def make_wishes(model: GPT) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Requests of which many begin alike, and what each of them gets alone."""
    source = random.Random(5)
    beginnings = [[source.randrange(20) for _ in range(n)] for n in (9, 16)]
    wishes = []
    for i in range(14):
        prompt = [source.randrange(20) for _ in range(source.randint(1, 14))]
        if i % 3:
            prompt = beginnings[i % 2][: source.randint(4, 16)] + prompt[:5]
        count = source.randint(1, min(20, 25 - len(prompt)))
        wishes.append({"prompt": prompt, "count": count, "seed": i, **KINDS[i % 4]})
    return wishes, [list(generate_tokens(model, **wish)) for wish in wishes]


def poison(engine: Engine) -> None:
    """Make what no row holds NaN: a request that read another's pages would get no number."""
    held = {page for row in engine.cache.rows for page in engine.cache.pages(row)}
    free = [page for page in range(engine.cache.k.shape[1]) if page not in held]
    engine.cache.k[:, free] = engine.cache.v[:, free] = torch.nan


@pytest.mark.parametrize("name", SCHEDULES)
def test_random_schedules_give_what_each_request_gets_alone(name):
    options, seeds = SCHEDULES[name]
    model = make_gpt(context=24, **options)
    wishes, expected = make_wishes(model)
    preempted = shared = cancelled = 0
    for seed in seeds:
        source = random.Random(seed)
        size, most = source.choice([1, 3, 4, 8]), source.randint(1, 5)
        pages = -(-24 // size) * source.choice([1, 1, 2, 3]) + source.randint(0, 3)
        budget = source.choice([256, most, most + 3, 16])
        rows = most + source.choice([0, 1, 8])
        engine = engine_of(model, pages, size, rows, max_batch=most, max_step_tokens=budget)
        queue, requests = [source.randrange(len(wishes)) for _ in range(7)], {}
        while queue or engine.running or engine.waiting:
            while queue and source.random() < 0.4:
                i = queue.pop()
                priority = source.choice([0, 0, 1])
                requests[submit(engine, **wishes[i], priority=priority)] = i
            if requests and source.random() < 0.05:
                engine.end(source.choice(list(requests)))
            poison(engine)
            engine.step()
        for request, i in requests.items():
            whole, got = expected[i], request.tokens
            assert request.done and got == whole[: len(got)], f"seed {seed}, request {i}"
            cancelled += len(got) < len(whole)
        preempted, shared = preempted + engine.preemptions, shared + engine.shared_tokens
        while engine._forget():
            pass
        assert engine.cache.rows == [] and engine.cache.free_pages == pages
    assert min(preempted, shared, cancelled) > 0


def test_no_step_reads_more_than_its_budget_and_who_writes_is_not_held_up():
    model, read = make_gpt(context=64), []
    engine = engine_of(model, max_batch=3, max_step_tokens=8)
    writer = submit(engine, [1, 2], 20)
    engine.step()
    handle = model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    reader = submit(engine, [*range(20), *range(19)], 2)
    for step in range(1, 7):
        engine.step()
        assert len(writer.tokens) == 1 + step and len(reader.tokens) == (step == 6)
    assert read == [*[8] * 5, 1 + 39 - 5 * 7]
    handle.remove()
    list(engine.run())
    assert [writer.tokens, reader.tokens] == [alone(x, engine) for x in (writer, reader)]


def test_a_beginning_is_read_once_also_if_another_is_about_to_read_it():
    model, read, text = make_gpt(context=64), [], [i % 20 for i in range(25)]
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    engine = engine_of(model, max_step_tokens=10)
    for i in range(4):
        submit(engine, [*text, i], 1)
    list(engine.run())
    assert read == [10, 10, 6, 3 * 2] and engine.shared_tokens == 3 * 24


def test_texts_not_used_for_longest_make_way():
    engine = engine_of(make_gpt(context=32), pages=8, max_batch=1)
    for token, n, shared in ((0, 13, 0), (1, 13, 0), (0, 13, 12), (5, 16, 12), (0, 13, 24)):
        submit(engine, [token] * n, 1)
        list(engine.run())
        assert engine.shared_tokens == shared


def test_a_higher_priority_has_a_head_start_and_starves_none():
    engine = engine_of(make_gpt(), max_batch=1)
    low, high = submit(engine, [1], 1), submit(engine, [2], 1, priority=1)
    assert [request for request, _ in engine.run()] == [high, low]
    low, begin = submit(engine, [1, 2, 3], 8), engine.steps
    while not low.done:
        submit(engine, [4], 1, priority=3)  # as many as there are steps
        engine.step()
    assert 3 * 16 < engine.steps - begin < 3 * 16 + 12
    assert low.tokens == alone(low, engine)


@pytest.mark.parametrize("lost", [torch.nan, None])
def test_a_step_that_fails_gives_pages_back_and_can_be_done_again(lost, monkeypatch):
    engine = engine_of(make_gpt())
    requests = [submit(engine, [i, 2, 3], 5) for i in range(3)]
    engine.step()
    engine.ordered = False  # all of the step
    with monkeypatch.context() as patch:
        scores = None if lost is None else torch.full((3, 1, 20), lost)
        patch.setattr(engine.model, "forward", lambda *_, **__: (scores,))
        with pytest.raises(FloatingPointError if lost else TypeError):
            engine.step()
    assert engine.cache.rows == [] and not engine.running
    list(engine.run())
    assert [x.tokens for x in requests] == [alone(x, engine) for x in requests]
