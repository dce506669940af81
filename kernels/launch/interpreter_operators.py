"""Fast tensor operators of the interpreter, for operands without promotion.

Triton applies its rules of promotion and broadcasting to `a + b`, with new handles and types for
both operands, before NumPy adds them. If both have one dtype, or one is a number that takes the
other's, or both are signed integers, NumPy's own broadcasting gives the same result. `quick` leaves
other cases to Triton. Valid for Triton 3.6 to 3.9.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_INTEGERS = frozenset({"int32", "int64"})
_FLOATS = frozenset({"fp32", "fp16"})
_NUMBERS = _INTEGERS | _FLOATS
_BITS = _INTEGERS | {"int1"}


class _Operator(NamedTuple):
    """NumPy's function, the dtypes for which it equals Triton's, and its result type."""

    function: Callable[..., Any]
    dtypes: frozenset[str]
    compares: bool = False


# Triton divides fp16 in fp32.
_OPERATORS = {
    "add": _Operator(np.add, _NUMBERS),
    "sub": _Operator(np.subtract, _NUMBERS),
    "mul": _Operator(np.multiply, _NUMBERS),
    "truediv": _Operator(np.divide, frozenset({"fp32"})),
    "and": _Operator(np.bitwise_and, _BITS),
    "or": _Operator(np.bitwise_or, _BITS),
    "xor": _Operator(np.bitwise_xor, _BITS),
    "rshift": _Operator(np.right_shift, _INTEGERS),
    "lt": _Operator(np.less, _NUMBERS, compares=True),
    "le": _Operator(np.less_equal, _NUMBERS, compares=True),
    "gt": _Operator(np.greater, _NUMBERS, compares=True),
    "ge": _Operator(np.greater_equal, _NUMBERS, compares=True),
    "eq": _Operator(np.equal, _NUMBERS, compares=True),
    "ne": _Operator(np.not_equal, _NUMBERS, compares=True),
}
_NAMES = {f"__{name}__": operator for name, operator in _OPERATORS.items()}
_REFLECTED = {f"__r{name}__": operator for name, operator in _OPERATORS.items()}


def quick(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """The method `name` of tl.tensor, by NumPy alone if equivalent, else `slow`."""
    if name == "__getitem__":
        return _with_new_dims(slow)
    reflected = name in _REFLECTED
    operator = _NAMES.get(name) or _REFLECTED.get(name)
    if operator is None:
        return slow
    function, dtypes, compares = operator

    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        dtype, name, block, data = self.dtype, self.dtype.name, self.type, self.handle.data
        kind = type(other)
        if kind is tl.tensor:
            if dtype.is_ptr() and function is np.add and not reflected:
                moved = _moved(self, other)
                return slow(self, other, **kwargs) if moved is None else moved
            operand = other.handle.data
            if other.dtype.name != name:
                if not (name in _INTEGERS and other.dtype.name in _INTEGERS and name in dtypes):
                    return slow(self, other, **kwargs)
                dtype, name = tl.int64, "int64"
            if other.type is not block:
                block = _common_type(block, other.type, dtype)
        else:
            if kind is tl.constexpr:
                other = other.value
                kind = type(other)
            small = kind is int and -(2**31) <= other < 2**31
            if name not in _NUMBERS or not (small or (kind is float and name in _FLOATS)):
                return slow(self, other, **kwargs)
            operand = data.dtype.type(other or 0)  # Triton drops the sign of -0.0
        if name not in dtypes or block is None:
            return slow(self, other, **kwargs)
        result = function(operand, data) if reflected else function(data, operand)
        if compares:
            dtype = tl.int1
            block = tl.block_type(dtype, block.shape) if block.is_block() else dtype
        elif 8 * result.itemsize != dtype.primitive_bitwidth and name != "int1":
            return slow(self, other, **kwargs)
        return tl.tensor(TensorHandle(result, dtype), block)

    return method


def _moved(pointers: Any, offsets: Any) -> Any:
    """Pointers plus offsets in elements, or None if Triton has to compute it."""
    if offsets.dtype.name not in _INTEGERS:
        return None
    dtype = pointers.dtype
    block = _common_type(pointers.type, offsets.type, dtype)
    if block is None:
        return None
    size = max(1, dtype.element_ty.primitive_bitwidth // 8)
    moved = pointers.handle.data + size * offsets.handle.data.astype(np.uint64)
    return tl.tensor(TensorHandle(moved, pointers.handle.dtype), block)


def _common_type(one: Any, other: Any, dtype: Any) -> Any:
    """The broadcast type with `dtype`, or None if Triton has to compute it."""
    shapes = [type.shape.values for type in (one, other) if type.is_block()]
    if not shapes:
        return dtype
    if len(shapes) == 2:
        left, right = shapes
        if len(left) != len(right) or any(
            1 != a != b != 1 for a, b in zip(left, right, strict=True)
        ):
            return None
        shapes = [[max(a, b) for a, b in zip(left, right, strict=True)]]
    return tl.block_type(dtype, shapes[0])


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index.start is index.stop is index.step is None


def _with_new_dims(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Fast x[:, None], x[None] and the like."""

    def method(self: Any, index: Any, **kwargs: Any) -> Any:
        if not self.type.is_block() or type(index) is not tuple:
            return slow(self, index, **kwargs)
        if not all(i is None or _is_whole(i) for i in index):
            return slow(self, index, **kwargs)
        if sum(i is not None for i in index) > len(self.type.shape.values):
            return slow(self, index, **kwargs)
        data = self.handle.data[index]
        block = tl.block_type(self.dtype, list(data.shape))
        return tl.tensor(TensorHandle(data, self.handle.dtype), block)

    return method
