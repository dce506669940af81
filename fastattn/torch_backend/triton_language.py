"""Evaluate users' @triton.jit functions (`mask_mod`, `score_mod`) on torch tensors.

The decorated Python function runs unchanged on tensors of all indices: see
`jit_functions.stand_ins`. Its arguments are `Value`s with Triton's arithmetic: integer // and %
round towards zero, and fractions are at least fp32. A function that branches on b or h runs once
for each of them.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import block_mask, tracing
from ..jit_functions import stand_ins


class Places(NamedTuple):
    """Indices of scores [rows, heads, T_q, T_k]: row 0 is batch row first_row, and heads likewise.

    q_pos [rows or 1, 1, T_q, 1] and k_pos [rows or 1, 1, 1, T_k] are int32.
    """

    first_row: int
    rows: int
    first_head: int
    heads: int
    q_pos: Tensor
    k_pos: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.rows, self.heads, self.q_pos.shape[2], self.k_pos.shape[3]

    def arguments(self) -> tuple[Tensor, ...]:
        """b [rows, 1, 1, 1], h [1, heads, 1, 1], q_pos and k_pos; int32."""
        b, h = (
            self._counted(first, count)
            for first, count in ((self.first_row, self.rows), (self.first_head, self.heads))
        )
        return b[:, None, None, None], h[None, :, None, None], self.q_pos, self.k_pos

    def _counted(self, first: int, count: int) -> Tensor:
        """int32 [count], from first on."""
        if count == 1 and type(first) is int:
            # Under tracing, this tensor is a constant, so branches on it are known.
            return torch.tensor([first], dtype=torch.int32, device=self.q_pos.device)
        return first + torch.arange(count, dtype=torch.int32, device=self.q_pos.device)

    def of_one(self, row: int, head: int) -> "Places":
        """The indices of one row and head."""
        q_pos, k_pos = (
            x if x.shape[0] == 1 else x[row : row + 1] for x in (self.q_pos, self.k_pos)
        )
        return Places(self.first_row + row, 1, self.first_head + head, 1, q_pos, k_pos)


def mask_mod(mod: Any, places: Places, tensors: tuple[Tensor, ...]) -> Tensor:
    """Evaluate a mask_mod, or an object with a `.mask_mod`: bool, broadcasts to the scores."""
    keep = _everywhere(getattr(mod, "mask_mod", mod), None, places, tensors, torch.float32)
    return keep if keep.dtype == torch.bool else keep != 0


def score_mod(mod: Any, x: Tensor, places: Places, tensors: tuple[Tensor, ...]) -> Tensor:
    """Apply a score_mod to scores, keeping shape and dtype; differentiable any number of times."""
    real = torch.promote_types(x.dtype, torch.float32)
    return _everywhere(mod, x, places, tensors, real).to(x.dtype).expand(x.shape)


def _everywhere(
    mod: Any, x: Tensor | None, places: Places, tensors: tuple[Tensor, ...], real: torch.dtype
) -> Tensor:
    """The function's result for all indices, broadcasting to their shape."""
    if torch.compiler.is_dynamo_compiling():
        _allow_in_graph()
        return _everywhere_by_name(block_mask.name_of(mod), x, real, *places, *tensors)
    return _evaluated(mod, x, places, tensors, real)


def _everywhere_by_name(name: str, x: Tensor | None, real: torch.dtype, *rest: Any) -> Tensor:
    """`_everywhere` as one graph node of torch.compile, as Dynamo cannot trace `Value`s."""
    # Within the node AOTAutograd and Inductor see torch's operators.
    count = len(Places._fields)
    return _evaluated(block_mask.named(name), x, Places(*rest[:count]), rest[count:], real)


def _allow_in_graph() -> None:
    torch.compiler.allow_in_graph(_everywhere_by_name)  # type: ignore[no-untyped-call]


# Called only while Dynamo traces, as allow_in_graph imports all of Dynamo.
_allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _NeedsOneBranch(Exception):
    """The function branched on several indices at once."""


def _evaluated(
    mod: Any, x: Tensor | None, places: Places, tensors: tuple[Tensor, ...], real: torch.dtype
) -> Tensor:
    """`_everywhere` in torch, if necessary head by head and row by row."""
    function = stand_ins.over(LANGUAGE, mod)
    pointers = [Pointer(tensor, 0, real) for tensor in tensors]

    def run(x: Tensor | None, places: Places) -> Tensor:
        scores = () if x is None else (Value(x.to(real), real),)
        result = function(*scores, *(Value(at, real) for at in places.arguments()), *pointers)
        y = torch.as_tensor(getattr(result, "x", result), device=places.q_pos.device)
        return y if y.dim() else y.expand(places.shape)  # of no index

    try:
        return run(x, places)
    except _NeedsOneBranch:
        pass
    rows = []
    for row in range(places.rows):
        heads = []
        for head in range(places.heads):
            one = None if x is None else x[row : row + 1, head : head + 1]
            at = places.of_one(row, head)
            try:
                heads.append(run(one, at).expand(at.shape))
            except _NeedsOneBranch as error:
                raise NotImplementedError(
                    f"{_name(mod)} branches on a tile of values, which Triton cannot; use tl.where"
                ) from error
        rows.append(torch.cat(heads, 1))
    return torch.cat(rows, 0)


def _name(mod: Any) -> str:
    return str(getattr(mod, "__name__", mod))


class Value:
    """A tensor with Triton's operators, defined below. `real`: the dtype used for fp32."""

    def __init__(self, x: Tensor, real: torch.dtype) -> None:
        self.x = x
        self.real = real

    def to(self, dtype: torch.dtype) -> "Value":
        """Cast; to an int, truncate."""
        return Value(self.x.to(self.real if dtype == torch.float32 else dtype), self.real)

    def __neg__(self) -> "Value":
        return Value(-self.x, self.real)

    def __invert__(self) -> "Value":
        return Value(~self.x, self.real)

    def __abs__(self) -> "Value":
        return Value(self.x.abs(), self.real)

    def __bool__(self) -> bool:
        if self.x.numel() != 1:
            raise _NeedsOneBranch
        return bool(self.x)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype for `to` and `tl.cast`."""
        return torch.float32 if self.x.dtype == self.real else self.x.dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METHODS:
            return partial(getattr(LANGUAGE, name), self)
        raise NotImplementedError(f".{name} of a Triton value is not supported in torch")


def _operand(x: Any, real: torch.dtype, fraction: bool) -> Any:
    """Convert an operand for Triton's arithmetic: bool to int32, ints to fp32 in fractions."""
    if not isinstance(x, Value):
        return x
    if fraction and not x.x.is_floating_point():
        return x.x.to(real)
    return x.x.to(torch.int32) if x.x.dtype == torch.bool else x.x


def _operator(combine: Callable[[Any, Any], Tensor], kind: str) -> Callable[[Any, Any], Value]:
    """An operator on two Values, or a Value and a number.

    kind: "number", "fraction" (even of two ints) or "bits" (bools stay bools).
    """

    def apply(a: Any, b: Any) -> Value:
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            return NotImplemented
        real = (a if isinstance(a, Value) else b).real
        if kind == "bits":
            return Value(combine(*(x.x if isinstance(x, Value) else x for x in (a, b))), real)
        fraction = kind == "fraction" or isinstance(a, float) or isinstance(b, float)
        return Value(combine(*(_operand(x, real, fraction) for x in (a, b))), real)

    return apply


def _tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor unchanged; a number as a tensor without dims, for any device."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def _floor_divide(x: Any, y: Any) -> Tensor:
    return torch.div(_tensor(x), _tensor(y), rounding_mode="trunc")


def _remainder(x: Any, y: Any) -> Tensor:
    return torch.fmod(_tensor(x), _tensor(y))


_OPERATORS: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "add": (operator.add, "number"),
    "sub": (operator.sub, "number"),
    "mul": (operator.mul, "number"),
    "truediv": (operator.truediv, "fraction"),
    "floordiv": (_floor_divide, "number"),
    "mod": (_remainder, "number"),
    "lshift": (operator.lshift, "number"),
    "rshift": (operator.rshift, "number"),
    "and": (operator.and_, "bits"),
    "or": (operator.or_, "bits"),
    "xor": (operator.xor, "bits"),
}
_COMPARISONS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
for _symbol, (_combine, _kind) in _OPERATORS.items():
    _forward = _operator(_combine, _kind)
    setattr(Value, f"__{_symbol}__", _forward)
    setattr(Value, f"__r{_symbol}__", lambda a, b, forward=_forward: forward(b, a))
for _symbol, _compare in _COMPARISONS.items():
    setattr(Value, f"__{_symbol}__", _operator(_compare, "number"))


class Pointer:
    """One of mod_tensors, at an offset in elements."""

    def __init__(self, tensor: Tensor, offset: Any, real: torch.dtype) -> None:
        self.tensor = tensor
        self.offset = offset
        self.real = real

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + steps, self.real)

    __radd__ = __add__

    def __sub__(self, steps: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset - steps, self.real)

    def load(self, mask: Value | None, other: Any) -> Value:
        """Load elements; `other` where mask is False."""
        flat = self.tensor.reshape(-1)
        flat = flat.to(self.real) if flat.dtype == torch.float32 else flat
        offset = self.offset.x if isinstance(self.offset, Value) else self.offset
        offset = _tensor(offset).to(flat.device, torch.int64)
        inside = (offset >= 0) & (offset < flat.shape[0])
        wanted = inside if mask is None else inside | ~mask.x
        if not tracing.may_be_traced(wanted) and not wanted.all():
            raise IndexError(
                f"tl.load reads outside of a mod tensor of {flat.shape[0]} elements, at offsets "
                f"{int(offset.min())} to {int(offset.max())}"
            )
        if mask is None:
            return Value(flat[offset], self.real)
        filler = 0 if other is None else other.x if isinstance(other, Value) else other
        loaded = flat[torch.where(inside & mask.x, offset, 0)]
        return Value(torch.where(mask.x, loaded, filler).to(flat.dtype), self.real)


def _fraction(x: Any, real: torch.dtype) -> Tensor:
    return _tensor(_operand(x, real, True), real)


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of fractions, also of constants."""

    def apply(*inputs: Any) -> Any:
        real = next((x.real for x in inputs if isinstance(x, Value)), None)
        if real is None:
            return function(*(_tensor(float(x), torch.float64) for x in inputs)).item()
        return Value(function(*(_fraction(x, real) for x in inputs)), real)

    return apply


def _choice(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    """maximum or minimum, of ints or fractions."""

    def combine(x: Any, y: Any) -> Tensor:
        dtype = torch.result_type(x, y)
        device = next(z.device for z in (x, y) if isinstance(z, Tensor))
        return choose(*(torch.as_tensor(z, dtype=dtype, device=device) for z in (x, y)))

    return _operator(combine, "number")


def _least(x: Any, y: Any, propagate_nan: bool = False) -> Any:
    return _choice(torch.minimum if propagate_nan else torch.fmin)(x, y)


def _largest(x: Any, y: Any, propagate_nan: bool = False) -> Any:
    return _choice(torch.maximum if propagate_nan else torch.fmax)(x, y)


def _clamp(x: Any, least: Any, largest: Any, propagate_nan: bool = False) -> Any:
    return _least(_largest(x, least, propagate_nan), largest, propagate_nan)


# Elementwise functions, by name in triton.language and libdevice.
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow"),
            *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
            *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc"),
            *("floor", "ceil", "trunc", "fmod", "hypot", "copysign", "isnan", "isinf"),
        )
    },
    "sqrt_rn": torch.sqrt,
    "fdiv": torch.true_divide,
    "div_rn": torch.true_divide,
    "rint": torch.round,
}
# Functions that are also methods of Triton's tensors.
_METHODS = frozenset(
    {"abs", "cast", "cdiv", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2"}
    | {"logical_and", "logical_or", "rsqrt", "sigmoid", "sin", "sqrt", "sqrt_rn"}
)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Value):
        return x if condition else y
    fraction = any(
        isinstance(z, float) or (isinstance(z, Value) and z.x.is_floating_point()) for z in (x, y)
    )
    real = condition.real

    def side(z: Any) -> Any:
        if fraction:
            return _fraction(z, real).to(condition.x.device)
        return z.x if isinstance(z, Value) else torch.tensor(z, device=condition.x.device)

    return Value(torch.where(condition.x != 0, side(x), side(y)), real)


def _load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Value:
    if not isinstance(pointer, Pointer):
        raise TypeError("tl.load takes one of the mod_tensors, plus an offset")
    return pointer.load(mask, other)


class _Language(stand_ins.Language):
    """The supported part of `triton.language`."""

    int1, int8, int16 = torch.bool, torch.int8, torch.int16
    int32, int64 = torch.int32, torch.int64
    float16 = fp16 = torch.float16
    bfloat16 = bf16 = torch.bfloat16
    float32 = fp32 = torch.float32
    float64 = fp64 = torch.float64

    load = staticmethod(_load)
    where = staticmethod(_where)
    minimum = staticmethod(_least)
    maximum = staticmethod(_largest)
    clamp = staticmethod(_clamp)
    zeros_like = staticmethod(lambda x: Value(torch.zeros_like(x.x), x.real))
    fma = staticmethod(lambda x, y, z: x * y + z)

    def __getattr__(self, name: str) -> Any:
        if name in _ELEMENTWISE:
            return _elementwise(_ELEMENTWISE[name])
        raise NotImplementedError(
            f"tl.{name} is not supported by the torch backend, which evaluates masks and scores"
        )


LANGUAGE = _Language()
