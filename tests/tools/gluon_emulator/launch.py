"""From the source of a Gluon kernel to a Python function that runs on stand-ins."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as real_hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction

from .language import Pointer, dynamic_range, hopper, language
from .machine import Machine
from .transfers import Descriptor
from .values import Tensor

_STAND_INS: list[tuple[Any, Any]] = [
    (gl, language),
    (tl, language),
    (real_hopper, hopper),
    *((getattr(real_hopper, name), stand_in) for name, stand_in in vars(hopper).items()),
]


@torch.autocast("cpu", enabled=False)  # of the caller: products here are torch's
def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, seed: int = 0, **kwargs: Any
) -> None:
    """Run a @gluon.jit kernel on the CPU, its programs one after the other.

    Args:
        kernel: what @gluon.jit made. It may call @gluon.jit and @triton.jit functions.
        grid: programs along up to three axes.
        args: CPU tensors, TensorDescriptors of CPU tensors, numbers, None, and constexprs.
        num_warps: of the default partition.
        seed: picks the order in which partitions run and transfers land.
        kwargs: further arguments of the kernel, by name.

    Raises:
        EmulationError: a subclass says which rule the kernel broke.
    """
    function = emulated(kernel)
    constants = {
        name
        for name, kind in kernel.fn.__annotations__.items()
        if "constexpr" in getattr(kind, "__name__", str(kind))
    }
    given = {**dict(zip(kernel.fn.__code__.co_varnames, args, strict=False)), **kwargs}
    named = {name: x if name in constants else _argument(x) for name, x in given.items()}
    x_size, y_size, z_size = (*grid, 1, 1)[:3]
    for number in range(x_size * y_size * z_size):
        y, z = number // x_size % y_size, number // (x_size * y_size)
        machine = Machine((number % x_size, y, z), (x_size, y_size, z_size), num_warps, seed)
        seed += 1
        machine.run(partial(function, **named))


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x.detach())
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, bool) or x is None:
        return x
    if isinstance(getattr(x, "fn", None), types.FunctionType):
        return emulated(x)
    if isinstance(x, int):
        return Tensor(torch.tensor(x, dtype=torch.int32 if abs(x) < 2**31 else torch.int64))
    if isinstance(x, float):
        return Tensor(torch.tensor(x, dtype=torch.float32))
    if isinstance(x, tuple):
        items = [_argument(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x


_emulated: dict[Any, Callable[..., Any]] = {}


def emulated(function: Any) -> Callable[..., Any]:
    """The Python function behind a jit function, with stand-ins for what it reads of Triton."""
    source: types.FunctionType = function.fn
    if source in _emulated:
        return _emulated[source]
    namespace: dict[str, Any] = {"range": dynamic_range}
    copy = types.FunctionType(
        source.__code__, namespace, source.__name__, source.__defaults__, source.__closure__
    )
    copy.__kwdefaults__ = source.__kwdefaults__
    # Before its globals: a helper may call itself.
    _emulated[source] = copy
    used = source.__code__.co_names
    namespace.update(
        (name, _stand_in(source.__globals__[name])) for name in used if name in source.__globals__
    )
    return copy


def _stand_in(value: Any) -> Any:
    for real, stand_in in _STAND_INS:
        if value is real:
            return stand_in
    if hasattr(value, "__triton_builtin__") and hasattr(hopper.tma, value.__name__):
        # What Triton can do but does not name in all versions.
        return getattr(hopper.tma, value.__name__)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, ConstexprFunction):
        # The compiler, too, has Python run it, on numbers and types.
        return value.fn
    if isinstance(getattr(value, "fn", None), types.FunctionType):
        return emulated(value)
    return value


class Emulated:
    """A kernel in the emulator, launched as Triton's are: Emulated(kernel)[grid](*args).

    Put in the kernel's place in its module, a launcher's own code runs on CPU tensors.
    """

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.kernel = kernel
        self.seed = seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(launch, self.kernel, grid, seed=self.seed)
