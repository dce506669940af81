"""State kept between calls, and CUDA graphs."""

import contextlib
import gc
import weakref

import pytest
import torch

from fastattn.tracing import may_keep, record_cuda_graph


def test_nothing_may_be_kept_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda x=capturing: x)
        assert may_keep(torch.device("cuda")) is not capturing
        assert may_keep(torch.device("cpu"))


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        return


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_replay_holds_the_tensors_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed, their memory would be written by others, and read by the graph."""
    graphs, runs = [], []

    def graph() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)

    def recorded():
        lengths = torch.ones(3)
        return record_cuda_graph(lambda: runs.append(lengths.sum())), weakref.ref(lengths)

    replay, lengths = recorded()
    gc.collect()
    assert lengths() is not None
    assert len(runs) == 2, "one run before that of the graph"
    replay()
    assert graphs[0].replays == 1
    del replay
    gc.collect()
    assert lengths() is None
