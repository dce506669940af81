"""Patches of Triton's interpreter: bfloat16, TF32, NaN, checks of memory, cheap helper calls.

Triton's interpreter runs a kernel's Python source; every tl operation ends in a method of one
`InterpreterBuilder`, on handles that pair a NumPy array with a Triton dtype. NumPy has no bfloat16:
such a handle carries the bits as uint16. The classes here each fix one aspect of the stock classes,
which `install` replaces. Valid for Triton 3.6 to 3.9.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

Array = npt.NDArray[Any]

_BF16_NAN = 0x7FC0
_TF32_MASK = np.uint32(0xFFFFE000)  # sign, 8 exponent bits, 10 of the 23 mantissa bits


class OutOfBoundsError(IndexError):
    """An interpreted kernel accessed memory outside its tensor arguments."""


class MisalignedError(ValueError):
    """An interpreted kernel accessed memory, or got a tensor, at an address that a GPU refuses."""


def bf16_bits(x: Array) -> Array:
    """Round float32 values to bfloat16, ties to even, as uint16 bits of x's shape."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(np.shape(x))
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = (bits + half) >> np.uint32(16)
    # The rounding's carry would turn some NaN into zero.
    return np.where(np.isnan(x), _BF16_NAN, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    """The float32 values of uint16 bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_bf16(handle: TensorHandle) -> bool:
    return bool(handle.dtype.scalar.name == "bf16")


def _widen(handle: TensorHandle) -> TensorHandle:
    """Convert bfloat16 to float32; leave other types."""
    return TensorHandle(bf16_values(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(bf16_bits(handle.data), tl.bfloat16)


class _Bfloat16(InterpreterBuilder):  # type: ignore[misc]
    """bfloat16 element by element: computed in float32 and rounded once, as on GPUs."""

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(bf16_bits(np.array([value], np.float32)), tl.bfloat16)

    def unary_op(self, arg: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        if _is_bf16(arg):
            return _narrow(super().unary_op(_widen(arg), op))
        return super().unary_op(arg, op)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]) -> Any:
        out = super().binary_op(_widen(lhs), _widen(rhs), op)
        if out.data.dtype == bool:
            # The stock comparison has its operands' type, not bool.
            return TensorHandle(out.data, tl.int1)
        return _narrow(out) if _is_bf16(lhs) else out

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        out = super().create_fma(_widen(x), _widen(y), _widen(z))
        return _narrow(out) if _is_bf16(z) else out

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if dst_type.scalar != tl.bfloat16:
            return super().cast_impl(_widen(src), dst_type)
        return _narrow(_widen(src))


class _TensorCores(InterpreterBuilder):  # type: ignore[misc]
    """tl.dot: bfloat16 and float16 products summed in float32, TF32 on request."""

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise_acc: Any
    ) -> TensorHandle:
        dtype = a.dtype.scalar
        if dtype not in (tl.bfloat16, tl.float16, tl.float32) or b.dtype.scalar != dtype:
            return super().create_dot(a, b, d, precision, imprecise_acc)
        tf32 = dtype == tl.float32 and precision == ir.INPUT_PRECISION.TF32
        product = np.matmul(_dot_operand(a, tf32), _dot_operand(b, tf32)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def _dot_operand(handle: TensorHandle, tf32: bool) -> Array:
    values = np.ascontiguousarray(_widen(handle).data, np.float32)
    return (values.view(np.uint32) & _TF32_MASK).view(np.float32) if tf32 else values


class _NanRules(InterpreterBuilder):  # type: ignore[misc]
    """maxnum and minnum of NaN and x are x; maximum and minimum stay NaN."""

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(
        self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nan: Any
    ) -> TensorHandle:
        if propagate_nan == ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(arg, lo), hi)
        return self.create_minimumf(self.create_maximumf(arg, lo), hi)


class _Reduce(stock.ReduceOps):  # type: ignore[misc]
    """Reductions of bfloat16 in float32, rounded once at the end."""

    def apply_impl(self, input: tuple[Any, ...]) -> tuple[Any, ...]:
        narrow = [_is_bf16(tensor.handle) for tensor in input]
        if not any(narrow):
            return super().apply_impl(input)
        wide = tuple(_with_handle(tensor, _widen(tensor.handle)) for tensor in input)
        out = super().apply_impl(wide)
        out = tuple(out) if isinstance(out, list | tuple) else (out,)
        return tuple(
            _with_handle(tensor, _narrow(tensor.handle)) if was_narrow else tensor
            for tensor, was_narrow in zip(out, narrow, strict=False)
        )

    def min_max(self, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        # As nanmax and nanmin, without the warning about rows of NaN.
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
        return super().min_max(input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _with_handle(tensor: Any, handle: TensorHandle) -> Any:
    block = tensor.type.is_block()
    dtype = tl.block_type(handle.dtype, list(tensor.shape)) if block else handle.dtype
    return tl.tensor(handle, dtype)


class _Extent(NamedTuple):
    """The bytes [first, end) of a tensor argument's storage."""

    argument: str
    first: int
    end: int


@dataclass
class _Launch:
    kernel: str
    extents: list[_Extent] = field(default_factory=list)
    language_is_patched: bool = False


# Running launches; a list, as a launch's hook may start another.
_launches: list[_Launch] = []


class _CheckedMemory(InterpreterBuilder):  # type: ignore[misc]
    """Check that every unmasked address is in the storage of a tensor argument, and a multiple of
    its element's bytes.
    """

    def create_masked_load(self, ptrs: TensorHandle, mask: Any, *args: Any, **kwargs: Any) -> Any:
        self._check("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, *args, **kwargs)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._check("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *args, **kwargs)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: Any, *args: Any
    ) -> Any:
        self._check("atomic", ptr, mask)
        return super().create_atomic_rmw(op, ptr, val, mask, *args)

    def create_atomic_cas(self, ptr: TensorHandle, *args: Any) -> Any:
        self._check("atomic", ptr, np.ones(1, bool))
        return super().create_atomic_cas(ptr, *args)

    def _check(self, access: str, pointers: TensorHandle, mask: TensorHandle | Array) -> None:
        kept = mask if isinstance(mask, np.ndarray) else mask.data
        addresses = pointers.data[np.broadcast_to(kept, pointers.data.shape).astype(bool)]
        if addresses.size == 0:
            return
        launch = _launches[-1]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if size > 1 and int(np.bitwise_or.reduce(addresses, axis=None)) % size:
            raise MisalignedError(
                f"{launch.kernel}: {access} of elements of {size} bytes between their multiples"
            )
        low, high = int(addresses.min()), int(addresses.max())
        if any(extent.first <= low and high + size <= extent.end for extent in launch.extents):
            return
        outside = np.ones(addresses.shape, bool)
        for extent in launch.extents:
            outside &= (addresses < extent.first) | (addresses + np.uint64(size) > extent.end)
        if outside.any():
            raise OutOfBoundsError(
                f"{launch.kernel}: {access} of {int(outside.sum())} element(s) outside every "
                f"tensor argument, in program {self.grid_idx}; the first is "
                + _place(int(addresses[outside][0]), launch.extents)
            )


def _place(address: int, extents: list[_Extent]) -> str:
    if not extents:
        return f"at address {address:#x}, and the kernel has no tensor argument"
    nearest = min(extents, key=lambda e: min(abs(address - e.first), abs(address - e.end)))
    return (
        f"at byte {address - nearest.first} of the storage of {nearest.argument}, "
        f"which has {nearest.end - nearest.first}"
    )


def _extents(name: str, arg: Any) -> Iterator[_Extent]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from _extents(name, item)
        return
    tensor = arg.base if isinstance(arg, TensorDescriptor) else stock._unwrap_tensor(arg)
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        yield _Extent(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class _GridExecutor(stock.GridExecutor):  # type: ignore[misc]
    """A launch: records its memory, and silences NumPy's warnings about NaN and infinity."""

    def __call__(self, *args_dev: Any, **kwargs: Any) -> None:
        _launches.append(_Launch(self.fn.__name__))
        try:
            with np.errstate(all="ignore"):
                super().__call__(*args_dev, **kwargs)
        except InterpreterError as error:
            cause = _first_cause(error)
            if isinstance(cause, (OutOfBoundsError, MisalignedError)):
                raise cause from None
            raise
        finally:
            _launches.pop()

    def _init_args_hst(self, args_dev: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        # The interpreter works on host copies of device tensors, so use their addresses.
        args, kwargs = super()._init_args_hst(args_dev, kwargs)
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        _launches[-1].extents = [extent for name, arg in named for extent in _extents(name, arg)]
        return args, kwargs


# A launch changes the language and the builder of the whole process, so launches take this lock. A
# launch waits for no other thread, so there is no deadlock. Re-entrant, as a launch's hook may
# start another.
_one_at_a_time = threading.RLock()
_stock_run = stock.InterpretedFunction.run


def _run(self: Any, *args: Any, **kwargs: Any) -> _Compiled | None:
    """Launch an interpreted kernel, one at a time in the process."""
    with _one_at_a_time:
        _stock_run(self, *args, **kwargs)
    return None if kwargs["warmup"] else _Compiled(self, args, kwargs)


class _Compiled:
    """A launch's kernel for later launches of the grid: like a compiled one, it assumes the dtypes
    and 16-byte alignment of the first tensors.
    """

    def __init__(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._kernel, self._options = kernel, options
        self._tensors = list(_specialised(args))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, {**self._options, "grid": grid})

    def _launch(self, options: dict[str, Any], *args: Any) -> None:
        for index, (then, now) in enumerate(zip(self._tensors, _specialised(args), strict=True)):
            if then[0] != now[0] or (then[1] and not now[1]):
                raise MisalignedError(
                    f"{self._kernel.__name__}: compiled for tensor {index} of {then[0]}"
                    f"{' at a multiple of 16 bytes' if then[1] else ''}, got it of {now[0]}"
                    f"{'' if now[1] else ' elsewhere'}"
                )
        _run(self._kernel, *args, **options)


def _specialised(arg: Any) -> Iterator[tuple[Any, bool]]:
    """Dtype of each tensor, and whether it is at a multiple of 16 bytes; also of what is None."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from _specialised(item)
    elif arg is None:
        yield None, False
    elif hasattr(arg, "data_ptr"):
        yield arg.dtype, arg.data_ptr() % 16 == 0


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _multiple_of(input: Any, values: Any) -> Any:
    """Round a stride or offset to its promised multiple, as compiled code would read elsewhere if
    the promise is broken, except where it multiplies the stride by 0.
    """
    if not isinstance(input, tl.tensor):
        return input
    values = values if isinstance(values, (list, tuple)) else [values]
    (factor,) = {x.value if isinstance(x, tl.constexpr) else x for x in values}
    data = input.handle.data
    rest = data % factor
    if not rest.any():
        return input
    return tl.tensor(TensorHandle(data - rest, input.handle.dtype), input.type)


def _defined(load: Callable[..., Any]) -> Callable[..., Any]:
    """tl.load whose masked elements without `other`, undefined on a GPU, are NaN or -1."""

    def with_other(
        pointer: Any, mask: Any = None, other: Any = None, *args: Any, **how: Any
    ) -> Any:
        if mask is not None and other is None:
            other = float("nan") if pointer.dtype.element_ty.is_floating() else -1
        return load(pointer, mask, other, *args, **how)

    return with_other


_stock_patch_lang = stock._patch_lang
_whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _patch_lang(fn: Any) -> Any:
    """Replace the language by interpreted functions, once per launch.

    The stock function does so at every call of a jit helper, tl.sum and tl.max included, for the
    modules that the helper uses. Here a launch replaces all of them once.
    """
    if _launches and _launches[-1].language_is_patched:
        return stock._LangPatchScope()
    scope = _stock_patch_lang(_whole_language)
    for module in (tl, tl.core):
        scope.set_attr(module, "multiple_of", _multiple_of)
        scope.set_attr(module, "load", _defined(module.load))
    # int() of a one-element array fails since NumPy 2.4, which broke `range` over a loaded bound in
    # Triton 3.6.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    if _launches:
        _launches[-1].language_is_patched = True
    return scope


_stock_np_dtype = stock._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype of a tile's elements; the stock function rebuilds its table at each call."""
    element = dtype.scalar
    if isinstance(element, tl.pointer_type):
        return _stock_np_dtype(dtype)
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _stock_np_dtype(element)
    return _np_dtypes[element.name]


_stock_argument = stock._implicit_cvt


def _argument(arg: Any) -> Any:
    """An argument in a kernel; the stock one keeps 32 bits of an int64 from 2**31 to 2**32."""
    if isinstance(arg, int) and 2**31 <= arg < 2**32:
        return tl.tensor(TensorHandle(np.array([arg], np.int64), tl.int64), tl.int64)
    return _stock_argument(arg)


class _Builder(_CheckedMemory, _NanRules, _TensorCores, _Bfloat16):
    pass


def install() -> None:
    """Replace Triton's classes by the patched ones."""
    # Kernels, tl functions and Triton's semantics all share this object.
    stock.interpreter_builder.__class__ = _Builder
    # The overflow check repeats every integer sum and product in 64 bits: half of all time.
    stock.interpreter_builder.options = stock.InterpreterOptions(sanitize_overflow=False)
    stock.ReduceOps = _Reduce
    stock.GridExecutor = _GridExecutor
    stock.InterpretedFunction.run = _run
    stock._patch_lang = _patch_lang
    stock._get_np_dtype = _np_dtype
    stock._implicit_cvt = _argument
