"""State of torch around a call: traces, symbolic sizes, transforms, autocast, CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function out of compiled graphs, such as one that communicates."""
    outside: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


def may_be_traced(x: Tensor) -> bool:
    """Whether a call with x is traced or transformed, or x is a subclass that overrides calls."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def transforming() -> bool:
    """Whether a transform of torch.func is active, outside torch.compile."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def is_mapped(x: Tensor) -> bool:
    """Whether torch.vmap maps x, at any level of torch.func's transforms."""
    return any(map(torch._C._functorch.is_batchedtensor, _at_levels(x)))


def wants_gradient(x: Tensor) -> bool:
    """Whether x requires grad, at any level of torch.func's transforms."""
    return x.requires_grad or (transforming() and any(y.requires_grad for y in _at_levels(x)))


def _at_levels(x: Tensor) -> Iterator[Tensor]:
    """x as each of torch.func's transforms has it, the innermost first."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        yield x
        x = functorch.get_unwrapped(x)
    yield x


def untransformed(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing traces, maps or transforms a backward of these, as its kernels need."""
    if torch.compiler.is_compiling() or transforming():
        return False
    present = [x for x in tensors if x is not None]
    dual = in_forward_mode() and any(map(has_tangent, present))
    return not dual and not any(map(is_legacy_batchedtensor, present))


def in_jit_trace() -> bool:
    """Whether torch.jit.trace records."""
    return torch._C._get_tracing_state() is not None


def refuse_constants(call: str) -> None:
    """Raise NotImplementedError in torch.jit.trace, for a call whose sizes it would not trace."""
    if in_jit_trace():
        raise NotImplementedError(
            f"torch.jit.trace would keep the sizes of this call for all others: {call}; use "
            "torch.export"
        )


def host_knows(x: Tensor) -> bool:
    """Whether reading a value needs no wait for a device, and nothing traces."""
    return x.is_cpu and not may_be_traced(x)


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside forward_ad.dual_level, torch.func.jvp or jacfwd."""
    return forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether x has a tangent at any level of torch.func's transforms, if `in_forward_mode`."""
    return bool(tangent_levels(x))


def tangent_levels(x: Tensor, level: int = 0) -> list[int]:
    """Indices of the transforms of torch.func at which x has a tangent; the innermost is 0.

    level: the index of the innermost.
    """
    if not transforming():
        return [level] if _is_dual(x) else []
    # Each transform wraps its tensors, and hides the tangents of outer transforms.
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
    """Whether torch.autocast is on; False for devices without it, such as meta."""
    return autocast_dtype(device) is not None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of torch.autocast, if it is on."""
    kind = device.type
    available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if available and torch.is_autocast_enabled(kind) else None


def without_autocast(
    function: Callable[Concatenate[Tensor, _P], _R],
) -> Callable[Concatenate[Tensor, _P], _R]:
    """Run a function outside of torch.autocast, which would compute fp32 products in its dtype."""

    @wraps(function)
    def outside(q: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if autocast_dtype(q.device) is None:
            return function(q, *args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args, **kwargs)

    return outside


def decided(condition: bool | torch.SymBool) -> bool:
    """A comparison of sizes as a Python bool; with symbols, for this graph."""
    # By a branch: a trace replaces bool() of a symbol by the symbol.
    if condition:  # noqa: SIM103
        return True
    return False


def always(comparison: bool | torch.SymBool | Tensor) -> bool:
    """Whether a comparison of sizes holds; in a trace, whether for all sizes."""
    # A traced comparison used as a bool becomes a condition of the graph: other sizes are traced
    # again, refused, or (torch.jit.trace) computed wrongly. This adds no condition: use True for an
    # optimisation, and let the code for False serve all sizes.
    if isinstance(comparison, Tensor):
        return False
    if not torch.compiler.is_compiling() and isinstance(comparison, bool):
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)


def ceil_div(size: Any, by: int) -> Any:
    """The number of parts, of `by` at most, of a size that may be a symbol."""
    return (size + by - 1) // by  # not of negative numbers, whose quotients ONNX rounds up


def record_cuda_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Record the launches of `work` on the current CUDA device, after one warm-up run.

    The replay keeps `work` and so its tensors alive: a graph stores their addresses.

    A backward in `work` needs its forward in `work` as well: autograd uses the stream of the
    forward, and a launch on another stream fails the capture.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Some libraries initialise at their first call on a stream.
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return partial(_replay, graph, work)


def _replay(graph: Any, work: Callable[[], object]) -> None:
    """Replay the graph; the parameter keeps `work` alive."""
    graph.replay()


def may_keep(device: torch.device) -> bool:
    """Whether a tensor made now may be kept for later calls: not during capture of a CUDA graph."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
