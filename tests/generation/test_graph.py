"""Steps that are recorded and replayed give what steps without a graph give."""

import random

import pytest
import torch
from small_gpt import make_gpt

from fastattn.cache.page_allocator import PageAllocator
from fastattn.generation.engine import Engine
from fastattn.generation.generate import generate_batch, generate_tokens
from fastattn.generation.graph import GraphWindow, PagedGraphs
from fastattn.generation.window import Window
from fastattn.models.sampling import Sampling
from fastattn.testing import assert_within_budget

# Rows of several lengths; idle rows, also full ones; windows that start anew, one row or all.
PLANS = {
    "ragged": [[[1, 2, 3], [4]], [[5], [6]], [[7], []], [[8], []], [[9], [10]]],
    "even": [[[1, 2], [3, 4]], [[5], [6]], [[7], [8]]],
    "past the context": [[[1, 2, 3, 4, 5], [6, 7]], *([[n], [n + 1]] for n in range(8, 18))],
    "all at once": [[[1] * 4, [2] * 4], *([[n], [n + 1]] for n in range(8, 18))],
    "idle while full": [
        [[1] * 6, [2]],
        *([[], [n]] for n in range(8, 18)),
        *([[n], [n + 1]] for n in range(3, 6)),
    ],
}


@pytest.mark.usefixtures("one_thread", "on_torch")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_replayed_steps_equal_steps_without_a_graph(plan, positions):
    """On the CPU a replay is the recorded function itself, run again.

    As on a GPU it runs once before, and finds the cache as it was before the step.
    """
    model = make_gpt(context=6, positions=positions)
    recorded, replayed = [], []

    def record(step):
        recorded.append(graph.caches[0].lengths.tolist())
        step()

        def replay():
            replayed.append(1)
            step()

        return replay

    graph, plain = GraphWindow(model, 2, record=record), Window(model, 2)
    double = Window(make_gpt(context=6, positions=positions).double(), 2)
    double.model.load_state_dict(model.state_dict())
    first: list[int] = []
    for pieces in plan:
        read = [row for row, piece in enumerate(pieces) if piece]
        held, replays = graph.held, len(replayed)
        got, naive, exact = (window.read(pieces)[read] for window in (graph, plain, double))
        assert_within_budget("logits", got, exact, naive)
        assert graph.held == plain.held
        assert all(c.lengths.tolist() == graph.held for c in graph.caches)
        if len(replayed) > replays:
            first = first or held
            assert all(c.length_bound == max(graph.held) for c in graph.caches)
    assert recorded == [first]
    assert len(replayed) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_cuda_graph_gives_the_same_tokens(positions):
    model = make_gpt(context=32, embed_dim=64, positions=positions, std=0.3).cuda()
    prompts = [torch.randint(20, (n,)).tolist() for n in (3, 40, 1)]
    greedy = Sampling(greedy=True)
    for counts in ([50, 30, 8], 40):
        plain, graph = (
            generate_batch(model, prompts, counts, sampling=greedy, cuda_graph=on)
            for on in (False, True)
        )
        assert graph == plain


@pytest.mark.gpu
def test_a_cuda_graph_is_recorded_once(monkeypatch):
    graphs = []
    original = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(1) or original())
    model = make_gpt(context=32, embed_dim=64).cuda()
    assert len(list(generate_tokens(model, [1, 2], 25, cuda_graph=True))) == 25
    assert graphs == [1]


@pytest.mark.usefixtures("one_thread", "on_torch")
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_an_engine_that_replays_its_steps_gives_what_requests_get_alone(positions, monkeypatch):
    """A replay knows nothing that the host knows; what no row holds is NaN, and stays."""
    model, source = make_gpt(context=16, positions=positions, num_kv_heads=1), random.Random(3)
    engine = Engine(model, num_pages=15, page_size=4, max_batch=5, max_step_tokens=9)
    recorded, replayed = [], []

    def record(step):
        recorded.append(1)

        def replay():
            replayed.append(1)
            with monkeypatch.context() as patch:
                for name in ("length", "pages", "rows"):
                    patch.setattr(PageAllocator, name, None)
                step()

        return replay

    engine._graphs = PagedGraphs(model, engine.cache, 5, record=record)
    greedy, drawn = Sampling(greedy=True), Sampling(top_k=6)
    wishes = [
        {"prompt": [source.randrange(20) for _ in range(source.randint(1, 12))],
         "count": source.randint(4, 12), "sampling": (greedy, drawn)[i % 2], "seed": i}
        for i in range(14)
    ]  # fmt: skip
    requests = []
    while engine.busy or len(requests) < len(wishes):
        if len(requests) < len(wishes):
            requests.append(engine.submit(**wishes[len(requests)]))
        held = {page for row in engine.cache.rows for page in engine.cache.pages(row)}
        free = [page for page in range(15) if page not in held]
        engine.cache.k[:, free] = engine.cache.v[:, free] = torch.nan
        engine.step()
    assert [r.tokens for r in requests] == [list(generate_tokens(model, **w)) for w in wishes]
    assert len(recorded) == len(engine._graphs._graphs) >= 2  # each size once
    assert len(replayed) > 2 * len(recorded) and engine.preemptions > 0
