"""The functions of gluon.language (and of triton.language, for helpers shared with plain kernels).

What is not here, types and layouts foremost, is taken from the real `gl`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor as TorchTensor
from triton.experimental.gluon import language as gl

from . import barriers, memory, products, transfers
from .errors import IllegalError, OutOfBoundsError, ResourceError
from .machine import current
from .values import Tensor, check_ranks, elementwise, from_torch, scalar, to_torch, unwrap

_REGISTERS = 64 * 1024  # of a multiprocessor
_LEAST_REGISTERS = 24  # that a thread can be left with

# What stands for inline assembly: its text, and a function of Tensors that does the same.
assembly: dict[str, Callable[..., Tensor]] = {}


@dataclass
class Pointer:
    """A tensor argument and an offset, or a tensor of offsets, in elements from its first."""

    base: TorchTensor
    offsets: Any = 0

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.base, unwrap(self.offsets + more))

    def __sub__(self, less: Any) -> "Pointer":
        return Pointer(self.base, unwrap(self.offsets - less))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=from_torch(self.base.dtype))

    def addresses(self, mask: Any, kind: str) -> tuple[TorchTensor, TorchTensor, TorchTensor]:
        """(storage from the first element on, offsets in it, which of them are accessed).

        kind: "load", "store" or "addition", for `GlobalMemory`.
        """
        first = self.base.storage_offset()
        length = self.base.untyped_storage().nbytes() // self.base.element_size() - first
        offsets = torch.as_tensor(unwrap(self.offsets)).long()
        kept = torch.as_tensor(True if mask is None else unwrap(mask))
        check_ranks(offsets, kept)
        kept = kept & (offsets == offsets)
        offsets = offsets.expand(kept.shape)
        outside = kept & ((offsets < -first) | (offsets >= length))
        if outside.any():
            raise OutOfBoundsError(
                f"offset {int(offsets[outside][0])} of a tensor of {length} elements"
            )
        flat = self.base.as_strided((length,), (1,), first)
        memory = current().machine.global_memory
        memory.touch(f"a thread's {kind}", kind == "addition", flat, offsets[kept])
        return flat, offsets, kept


def load(pointer: Pointer, mask: Any = None, other: Any = None, **cache: Any) -> Tensor:
    flat, offsets, kept = pointer.addresses(mask, "load")
    values = flat[torch.where(kept, offsets, 0)]
    if mask is not None:
        fill = torch.as_tensor(math.nan if other is None else unwrap(other))
        values = torch.where(kept, values, fill.to(values.dtype))
    return Tensor(values)


def store(pointer: Pointer, value: Any, mask: Any = None, **cache: Any) -> None:
    flat, offsets, kept = pointer.addresses(mask, "store")
    values = torch.as_tensor(unwrap(value)).to(flat.dtype)
    check_ranks(offsets, values)
    values = values.expand(offsets.shape)
    flat[offsets[kept]] = values[kept]


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **how: Any) -> Tensor:
    """Returns what was there before, as the instruction does."""
    flat, offsets, kept = pointer.addresses(mask, "addition")
    before = flat[torch.where(kept, offsets, 0)].clone()
    values = torch.as_tensor(unwrap(value)).to(flat.dtype).expand(offsets.shape)
    flat.index_add_(0, offsets[kept].reshape(-1), values[kept].reshape(-1))
    return Tensor(before)


def program_id(axis: int) -> Tensor:
    return scalar(current().machine.program[axis])


def num_programs(axis: int) -> Tensor:
    return scalar(current().machine.grid[axis])


def num_warps() -> int:
    return current().warps


def barrier(**scope: Any) -> None:
    """The warps of a partition run as one, so there is nothing to wait for."""


def constexpr(x: Any) -> Any:
    return x


def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise IllegalError(f"static_assert: {message}")


def dynamic_range(*bounds: Any, **options: Any) -> Iterator[Tensor]:
    """`range` over run-time integers; its numbers are int32 scalars."""
    return map(scalar, range(*(int(unwrap(bound)) for bound in bounds)))


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    size = end - start
    if size <= 0 or size & (size - 1):
        raise IllegalError(f"the length of arange must be a power of 2, got {size}")
    return Tensor(torch.arange(start, end, dtype=torch.int32), layout)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    number = torch.as_tensor(unwrap(value)).to(to_torch(dtype))
    return Tensor(number.expand(list(shape)).clone(), layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Tensor) -> Tensor:
    return Tensor(torch.zeros_like(x.data), x.layout)


def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    return Tensor(x.data, layout)


def cast(x: Any, dtype: Any) -> Tensor:
    return Tensor(torch.as_tensor(unwrap(x)).to(to_torch(dtype)), getattr(x, "layout", None))


def to_tensor(x: Any) -> Any:
    return x if isinstance(x, Tensor) else Tensor(torch.as_tensor(x))


def expand_dims(x: Tensor, axis: int) -> Tensor:
    return Tensor(x.data.unsqueeze(axis))


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    if isinstance(layout, barriers.mbarrier.MBarrierLayout):
        return barriers.allocate(list(shape))
    return memory.allocate(element_ty, shape, layout, value)


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Tensor:
    if asm not in assembly:
        raise IllegalError(f"no meaning is registered in gluon_emulator.assembly for: {asm}")
    actual = assembly[asm](*args)
    if actual.data.dtype == torch.int16:  # a register of 16 bits has no type
        return Tensor(actual.data.view(to_torch(dtype)), actual.layout)
    return actual


def warp_specialize(
    functions_and_args: list[tuple[Callable[..., Any], tuple[Any, ...]]],
    worker_num_warps: list[int],
    worker_num_regs: list[int] | None = None,
) -> None:
    """Run each function in a partition of its own; the first one in this one."""
    partition = current()
    if len(functions_and_args) != len(worker_num_warps) + 1:
        raise IllegalError("warp_specialize takes the warps of every partition but the default")
    if worker_num_regs is not None:
        # Registers are given to groups of four warps.
        groups = [max(1, -(-warps // 4)) for warps in worker_num_warps]
        used = sum(128 * n * regs for n, regs in zip(groups, worker_num_regs, strict=True))
        left = _REGISTERS - used
        if left < _LEAST_REGISTERS * 32 * partition.warps:
            raise ResourceError(f"{used} registers for workers leave {left} to {partition.name}")
    bodies = [partial(function, *args) for function, args in functions_and_args]
    warps = [partition.warps, *worker_num_warps]
    partition.machine.specialize(list(zip(bodies, warps, strict=True)))


def _reduction(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axis: int | None = None, **options: Any) -> Tensor:
        if axis is None:
            return Tensor(function(x.data.reshape(-1), 0))
        return Tensor(function(x.data, axis))

    return reduce


def _extreme(of_numbers: Callable[..., Any], function: Callable[..., TorchTensor]) -> Any:
    """A Python number of Python numbers, as constexprs have; of tensors one of their dtype."""

    def apply(a: Any, b: Any) -> Any:
        tensors = [x.data for x in (a, b) if isinstance(x, Tensor)]
        if not tensors:
            return of_numbers(a, b)
        dtype = tensors[0].dtype if tensors[0].is_floating_point() else None
        return elementwise(
            lambda *given: function(*(torch.as_tensor(x, dtype=dtype) for x in given)), a, b
        )

    return apply


def where(condition: Any, a: Any, b: Any) -> Tensor:
    x, y = unwrap(a), unwrap(b)
    tensors = [v for v in (x, y) if isinstance(v, TorchTensor)]
    if len(tensors) < 2:
        dtype = tensors[0].dtype if tensors else None
        x, y = torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=dtype)
    kept = torch.as_tensor(unwrap(condition))
    check_ranks(kept, x, y)
    layout = next((v.layout for v in (a, b, condition) if getattr(v, "layout", None)), None)
    if not tensors and not x.dtype.is_floating_point:
        x, y = x.int(), y.int()
    return Tensor(torch.where(kept, x, y), layout)


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


# On a GPU the larger of NaN and a number is the number.
maximum, minimum = _extreme(max, torch.fmax), _extreme(min, torch.fmin)

_FUNCTIONS: dict[str, Any] = {
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "sum": _reduction(torch.sum),
    **{
        name: partial(elementwise, getattr(torch, name))
        for name in (
            "exp2",
            "exp",
            "log2",
            "log",
            "rsqrt",
            "sqrt",
            "abs",
            "floor",
            "ceil",
            "tanh",
            "sigmoid",
        )
    },
    "split": lambda x: tuple(map(Tensor, x.data.unbind(-1))),
    "join": partial(elementwise, lambda x, y: torch.stack((x, y), -1)),
    "fma": partial(elementwise, lambda x, y, z: x * y + z),
    "static_range": range,
    "range": dynamic_range,
    **dict.fromkeys(("multiple_of", "max_contiguous", "assume"), lambda x, *hint: x),
}


class Language:
    """Stands in for the modules `gl` and `tl`."""

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if name in _DEFINED:
            return globals()[name]
        actual = getattr(gl, name)
        if callable(actual) and not isinstance(actual, type | gl.dtype):
            raise IllegalError(f"gluon_emulator does not know gl.{name}")
        return actual


_DEFINED = frozenset(
    {"load", "store", "atomic_add", "program_id", "num_programs", "num_warps", "barrier"}
    | {"constexpr", "static_assert", "arange", "full", "zeros", "zeros_like", "convert_layout"}
    | {"cast", "to_tensor", "expand_dims", "allocate_shared_memory", "inline_asm_elementwise"}
    | {"warp_specialize", "where", "cdiv", "maximum", "minimum"}
)
language = Language()

hopper = SimpleNamespace(
    tma=transfers.tma,
    mbarrier=barriers.mbarrier,
    fence_async_shared=memory.fence_async_shared,
    warpgroup_mma=products.warpgroup_mma,
    warpgroup_mma_wait=products.warpgroup_mma_wait,
    warpgroup_mma_init=products.warpgroup_mma_init,
)
