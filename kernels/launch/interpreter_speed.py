"""Make the interpreter about twice as fast, with equal results.

The interpreter runs Triton's front end, written for one pass over a kernel, at every operation of
every program, so that NumPy gets a fraction of the time. Here types are cached, a tensor's
attributes are copied from its type, operands without promotion skip its rules, and calls skip the
wrappers of the language's functions. Valid for Triton 3.6 to 3.9.
"""

from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from .interpreter_operators import quick

_init_block_type = tl.block_type.__init__
_init_tensor = tl.tensor.__init__
_equal_dtypes = tl.dtype.__eq__
_unwrap = tl.core._unwrap_if_constexpr

# Classes that are no constexpr and contain none.
_PLAIN = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type})
_INTEGERS = frozenset({"int32", "int64"})
_FLOATS = frozenset({"fp32", "fp16", "bf16"})


def _block_type(cls: type, element_ty: Any, shape: Any) -> Any:
    """Cached block type for these elements and this shape, stored in the elements' type."""
    types = element_ty.__dict__.get("_blocks") if cls is tl.block_type else None
    if types and isinstance(shape, list | tl.tuple):
        sizes = tuple([s.value if type(s) is tl.constexpr else s for s in shape])
        if sizes in types:
            return types[sizes]
    return object.__new__(cls)


def _init_block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    if "numel" in self.__dict__:
        return
    _init_block_type(self, element_ty, shape)
    if type(self) is tl.block_type:
        self.element_ty.__dict__.setdefault("_blocks", {})[tuple(self.shape)] = self


def _init_tensor_by_type(self: Any, handle: Any, type: Any) -> None:
    """Copy all attributes but the handle from the type's first tensor."""
    attributes = type.__dict__.get("_attributes")
    if attributes is None:
        _init_tensor(self, handle, type)
        type._attributes = {name: x for name, x in self.__dict__.items() if name != "handle"}
        return
    self.__dict__.update(attributes)
    self.handle = handle


def _equal(self: Any, other: Any) -> bool:
    if type(self) is type(other) is tl.dtype:
        return bool(self.name == other.name)
    return self is other or _equal_dtypes(self, other)


def _unwrap_if_constexpr(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    return x.value if kind is tl.constexpr else _unwrap(x)


class _Semantic(TritonSemantic):  # type: ignore[misc]
    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if arithmetic_check and not div_or_mod:
            if type(rhs) is tl.tensor:
                lhs = self._constant(lhs, rhs.dtype)
            elif type(lhs) is tl.tensor:
                rhs = self._constant(rhs, lhs.dtype)
            if type(lhs) is type(rhs) is tl.tensor:
                one, other = lhs.dtype.name, rhs.dtype.name
                same = one == other and (one in _INTEGERS or one in _FLOATS)
                if same or (allow_lhs_ptr and other in _INTEGERS and lhs.dtype.is_ptr()):
                    return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def _constant(self, x: Any, dtype: Any) -> Any:
        """A number as a scalar of the other operand's dtype, if it is promoted to it."""
        small = type(x) is int and -(2**31) <= x < 2**31
        if (small and dtype.name in _INTEGERS) or (
            (small or type(x) is float) and dtype.name in _FLOATS
        ):
            return self.scalar_constant(x, dtype)
        return x

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type is rhs.type:
            return lhs, rhs
        if not lhs.type.is_block():
            return (self._filled(lhs, rhs.type.shape) if rhs.type.is_block() else lhs), rhs
        if not rhs.type.is_block():
            return lhs, self._filled(rhs, lhs.type.shape)
        if lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def _load_legacy(self, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        """Skip making a tile of a zero `other`, which is the interpreter's default."""
        if mask is not None and other is not None and not other.type.is_block():
            bits = other.handle.data.tobytes()
            other = other if any(bits) else None
        return super()._load_legacy(ptr, mask, other, *options)

    def _filled(self, scalar: Any, shape: Any) -> Any:
        block = tl.block_type(scalar.dtype, shape)
        return self.tensor(self.builder.create_splat(block, scalar.handle), block)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Interpret a function of the language without its wrapper."""
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = stock.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, quick(name, interpreted) if obj is tl.tensor else interpreted)


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """Skip the check of the array's width, which `binary_op` ensures."""
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr


def install() -> None:
    """Replace Triton's functions by the fast ones."""
    tl.block_type.__new__ = _block_type
    tl.block_type.__init__ = _init_block_type_once
    tl.tensor.__init__ = _init_tensor_by_type
    stock.TensorHandle.__init__ = _init_handle
    tl.dtype.__eq__ = _equal
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
    stock.interpreter_semantic.__class__ = _Semantic
    stock._patch_attr = _patch_attr
