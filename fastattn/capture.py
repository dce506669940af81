"""CUDA graphs: how work is captured, and which tensors made meanwhile may be kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def record_cuda_graph(work: Callable[[], object]) -> Callable[[], object]:
    """A replay of what `work` launches on the current CUDA device; runs it once, to warm it up.

    The replay holds `work`, and by it the tensors it is called on: a graph knows their addresses.

    A backward in `work` needs its forward in `work` as well: autograd runs it on the stream of its
    forward, and what is launched on another stream than the capture's is an error of the capture.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Some libraries set themselves up at their first call on a stream.
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return partial(_replay, graph, work)


def _replay(graph: Any, work: Callable[[], object]) -> None:
    """work is there to be held."""
    graph.replay()


def may_keep(device: torch.device) -> bool:
    """Whether a tensor made now may be kept for later calls.

    While a CUDA graph is captured its contents are only recorded, and its memory is the graph's.
    """
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
