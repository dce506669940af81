"""A fake H100 for torch and Triton: CPU tensors that pose as CUDA tensors, and a stub driver.

Triton's own driver, specialisation, compiler and packing of arguments run; kernels do not, so what
they would have written reads as 0. Import this before triton and fastattn.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import native
import torch
import triton
from stage import ANSWERS, H100, Stage
from torch import Tensor

_DRIVER = native.load_driver()
GPU = torch.device("cuda", 0)
_real_device = torch._C.TensorBase.device.__get__
_ticks = itertools.count()
_random = torch.zeros(16, dtype=torch.uint8)  # a seed and an offset, as CUDA's generator has

stage = Stage(lambda: count_of("launches"))


def count_of(what: str) -> int:
    """How many "launches", tensor maps ("descriptors") that the driver accepted, or launches that
    may begin before the one ahead of them has ended ("early").
    """
    return int(getattr(_DRIVER, f"dry_run_{what}")())


class Stream:
    """A stream, one of those that torch hands out."""

    cuda_stream = 0
    device = GPU
    current: "Stream"

    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        _wait("Stream.synchronize")


Stream.current = Stream()


class _Entered:
    """`with torch.cuda.stream(s)`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, Stream.current = Stream.current, self._stream

    def __exit__(self, *error: object) -> None:
        Stream.current = self._before


class Event:
    """An event; a millisecond passes between any two records."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed, self._tick = enable_timing, -1

    def record(self, stream: object = None) -> None:
        self._tick = next(_ticks)

    def synchronize(self) -> None:
        _wait("Event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        assert self._timed and end._timed, "events without enable_timing"
        assert 0 <= self._tick < end._tick, "events not recorded, or in another order"
        return float(end._tick - self._tick)


class Graph:
    """A CUDA graph: counts the launches that it holds and its replays."""

    capturing: "Graph | None" = None
    replays = 0

    def __init__(self) -> None:
        self.launches = -1

    def replay(self) -> None:
        assert self.launches > 0, "a graph that holds no launch"
        Graph.replays += 1


class _Capture:
    """`with torch.cuda.graph(g)`, which captures on a stream of its own."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._entered = graph, _Entered(Stream())

    def __enter__(self) -> None:
        assert Graph.capturing is None
        self._entered.__enter__()
        Graph.capturing = self._graph
        self._begin = count_of("launches")

    def __exit__(self, *error: object) -> None:
        self._graph.launches = count_of("launches") - self._begin
        Graph.capturing = None
        self._entered.__exit__()


def _wait(how: str) -> None:
    stage.waited(how)
    if Graph.capturing is not None:
        raise RuntimeError(f"{how} while a CUDA graph is captured")


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function `owner.name`, where there is one, by what `make` makes of it."""
    before = getattr(owner, name, None)
    if callable(before):
        setattr(owner, name, functools.wraps(before)(make(before)))


def _is_gpu(x: object) -> bool:
    return str(x).startswith("cuda") if isinstance(x, str | torch.device) else False


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the CPU for the GPU; memory on the host that is pinned is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args = tuple("cpu" if _is_gpu(x) else x for x in args)
        return function(*args, **{k: "cpu" if _is_gpu(x) else x for k, x in kwargs.items()})

    return call


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _wait(function.__name__)
        return function(*args, **kwargs)

    return call


def _copying(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap like `_on_cpu`; the host waits where its own numbers go straight to the GPU."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        waits = _is_gpu(kwargs.get("device"))
        return _on_cpu(_waiting(function) if waits else function)(*args, **kwargs)

    return call


def _zeroed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        x = _on_cpu(function)(*args, **kwargs)
        with torch.no_grad():
            return x.zero_() if x.element_size() > 1 else x.view(torch.uint8).zero_().view(x.dtype)

    return call


def _device(x: Tensor) -> torch.device:
    """A tensor's device as it poses."""
    with torch._C.DisableTorchFunction():
        real = _real_device(x)
    return GPU if real.type == "cpu" else real


# What is made of each function of torch and tensors.
_POSED = {
    _on_cpu: (
        "arange", "eye", "full", "full_like", "linspace", "load", "ones", "ones_like", "rand",
        "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor",
        "tril_indices", "zeros", "zeros_like", "new_full", "new_ones", "new_zeros", "to",
    ),
    _copying: ("as_tensor", "new_tensor", "tensor"),
    _zeroed: ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    # Where the host reads what the GPU holds.
    _waiting: (
        "__bool__", "__float__", "__index__", "__int__", "allclose", "bincount", "cpu", "equal",
        "item", "masked_select", "nonzero", "numpy", "tolist", "unique",
    ),
}  # fmt: skip


def _pose_tensors() -> None:
    for make, names in _POSED.items():
        for owner, name in itertools.product((torch, Tensor), names):
            _patch(owner, name, make)
    Tensor.device = property(_device)
    Tensor.is_cuda = property(lambda x: _device(x).type == "cuda")
    Tensor.is_cpu = property(lambda x: _device(x).type == "cpu")
    Tensor.get_device = lambda x: 0
    Tensor.cuda = lambda x, *args, **kwargs: x
    Tensor.pin_memory = lambda x, *args: x
    torch.Generator = _Generator


class _OfGenerators(type):
    real = torch.Generator

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.real)

    def __call__(cls, device: object = "cpu") -> Any:
        return cls.real()


class _Generator(metaclass=_OfGenerators):
    """`torch.Generator`, of whatever device."""


def _pose_autocast() -> None:
    """torch.autocast("cuda") acts on the tensors that pose."""

    def by_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _on_cpu(function)(*(args or ("cpu",)), **kwargs)

    _patch(torch.amp.autocast_mode.autocast, "__init__", _on_cpu)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        _patch(torch, name, by_cpu)


def _pose_cuda() -> None:
    cuda = torch.cuda
    constants = ANSWERS | {
        "is_initialized": True, "get_device_name": H100.name, "is_bf16_supported": True,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "reset_peak_memory_stats": None, "empty_cache": None, "set_device": None,
        "mem_get_info": (80 << 30, 80 << 30), "manual_seed_all": None,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    replaced = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _Capture,
        "stream": _Entered,
        "current_stream": lambda device=None: Stream.current,
        "default_stream": lambda device=None: Stream.current,
        "is_current_stream_capturing": lambda: Graph.capturing is not None,
        "synchronize": lambda device=None: _wait("torch.cuda.synchronize"),
        "get_rng_state": lambda device=None: _random.clone(),
        "set_rng_state": lambda state, device=None: _random.copy_(state),
        "device": lambda device: nullcontext(),
        "device_of": lambda x: nullcontext(),
    }
    for name, function in replaced.items():
        setattr(cuda, name, function)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.version.cuda = "12.8"


def _heard(*, repr: str, **details: Any) -> None:
    stage.compiled(repr.partition("[")[0])


_pose_tensors()
_pose_autocast()
_pose_cuda()
triton.knobs.runtime.jit_post_compile_hook = _heard
