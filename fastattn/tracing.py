"""State of torch around a call: traces, symbolic sizes, transforms, autocast, CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def may_be_traced(x: Tensor) -> bool:
    """Whether a call with x is traced or transformed, or x is a subclass with calls of its own."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def transforming() -> bool:
    """Whether a transform of torch.func is at work outside torch.compile, which has its own."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def host_knows(x: Tensor) -> bool:
    """Whether to read a value costs no wait for a device, and nothing traces."""
    return x.is_cpu and not may_be_traced(x)


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside forward_ad.dual_level, torch.func.jvp or jacfwd."""
    return forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode AD carries a tangent of x, at any level of torch.func's transforms.

    For calls inside forward mode (`in_forward_mode`).
    """
    return bool(tangent_levels(x))


def tangent_levels(x: Tensor, level: int = 0) -> list[int]:
    """At which transforms of torch.func there is a tangent of x, from the innermost, which is 0.

    level: the number of the innermost.
    """
    if not transforming():
        return [level] if _is_dual(x) else []
    # Each transform wraps the tensors that it follows, and hides what a transform outside it knows.
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    functorch = torch._C._functorch
    transform = retrieve_current_functorch_interpreter()
    levels = []
    if functorch.maybe_get_level(x) == transform.level():
        if transform.key() == functorch.TransformType.Jvp and _is_dual(x):
            levels = [level]
        x = functorch.get_unwrapped(x)
    with transform.lower():
        return levels + tangent_levels(x, level + 1)


def _is_dual(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def autocasting(device: torch.device) -> bool:
    """Whether torch.autocast is on; torch raises where a device, such as meta, has none."""
    return autocast_dtype(device) is not None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast casts to, where it is on."""
    kind = device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def decided(condition: bool | torch.SymBool) -> bool:
    """The truth of a comparison of sizes as Python's own; where they are symbols, for this graph.

    By a branch: what is traced takes bool() of a symbol for the symbol.
    """
    if condition:  # noqa: SIM103
        return True
    return False


def always(comparison: bool | torch.SymBool | Tensor) -> bool:
    """Whether a comparison of sizes holds; where torch traces, whether it holds for all sizes.

    A traced comparison that is used as a bool becomes a condition of the graph: other sizes trace
    it again, or are refused, or (torch.jit.trace) computed as if it still held. This asks nothing
    of the sizes, so the code behind True is for what is known, and that behind False serves any.
    """
    if isinstance(comparison, Tensor):
        return False
    if not torch.compiler.is_compiling() and isinstance(comparison, bool):
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)


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
