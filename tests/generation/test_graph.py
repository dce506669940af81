"""Steps that are recorded and replayed give what steps without a graph give."""

import pytest
import torch
from small_gpt import make_gpt

from fastattn.generation.generate import generate_batch, generate_tokens
from fastattn.generation.graph import GraphWindow
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
        held, replays = list(graph.held), len(replayed)
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
