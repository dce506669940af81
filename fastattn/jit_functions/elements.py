"""Numbers of a Python function while it is translated: torch's arithmetic, recorded as Triton's.

Integer // and % round down in torch and towards zero in Triton; bools are no numbers in Triton.
Indices have 64 bits in torch and 32 in kernels, which take 64 where a product needs them.
"""

import operator
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .symbols import LANGUAGE, Symbol


class NotTranslated(Exception):
    """A function does what has no translation to Triton; the message says what."""


class Reader(Protocol):
    """The translation that elements belong to, as they see it."""

    device: torch.device

    def read(self, x: Any) -> Any:
        """An operand; of a tensor its only element."""


READER: ContextVar[Reader] = ContextVar("READER")


_INT32 = 2**31


class Element:
    """A number of a known dtype: an index, a score, or what was computed from them.

    value: a `Symbol`, or a Python number if it is constant. natural: it cannot be negative. most:
    bound of an integer's magnitude.
    """

    def __init__(
        self, value: Any, dtype: torch.dtype, natural: bool = False, most: int = _INT32
    ) -> None:
        self.value, self.dtype, self.most = value, dtype, most
        constant = not isinstance(value, Symbol) and value >= 0
        self.natural = natural or constant or dtype == torch.bool

    @property
    def device(self) -> torch.device:
        return READER.get().device

    shape = torch.Size()
    ndim = 0
    __array_ufunc__ = None  # numbers of numpy leave operators to elements

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _FUNCTIONS:
            raise NotTranslated(f"uses .{name} of an index or score")
        return partial(apply, name, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return apply(function.__name__, *args, **(kwargs or {}))

    def _no_number(self, *_: Any) -> Any:
        raise NotTranslated(
            "needs the value of an index or score in Python (`if`, `and`, int(), a list): use &, "
            "|, ~, torch.where or a tensor"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _no_number
    __hash__ = object.__hash__


def apply(name: str, *operands: Any, **options: Any) -> Any:
    """The result of a function or operator of torch; __radd__ is add of swapped operands."""
    name = name.strip("_")
    if name not in _FUNCTIONS and name[:1] == "r" and name[1:] in _FUNCTIONS:
        name, operands = name[1:], operands[::-1]
    read = READER.get().read
    given = list(map(read, operands))
    if name not in _FUNCTIONS:
        raise NotTranslated(f"calls {name} of an index or score")
    try:
        return _FUNCTIONS[name](*given, **{key: read(x) for key, x in options.items()})
    except TypeError as error:
        raise NotTranslated(f"calls {name} in a way that is not known: {error}") from error


_Function = Callable[..., Any]
_FUNCTIONS: dict[str, _Function] = {}


def _records(*names: str) -> Callable[[_Function], _Function]:
    """Enter a function under torch's names."""

    def enter(function: _Function) -> _Function:
        _FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return enter


@cache
def _sample(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device="cpu")


def _common(*operands: Any) -> torch.dtype:
    """The dtype of a result of these operands, as torch promotes."""
    x, y = (_sample(x.dtype) if isinstance(x, Element) else x for x in operands)
    return torch.result_type(x, y)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Element) else x


def number(x: Any) -> Any:
    """The value of an operand of arithmetic: of a bool 0 or 1."""
    value = _value(x)
    if isinstance(value, bool):
        return int(value)
    is_bool = isinstance(x, Element) and x.dtype == torch.bool
    return value.to(LANGUAGE.int32) if is_bool else value


def _most(x: Any) -> int:
    value = _value(x)
    return x.most if isinstance(value, Symbol) else int(abs(value)) if is_integer(x) else 1


def _numbers(*operands: Any, most: int = 0) -> list[Any]:
    """Values of operands of arithmetic; 64 bits where a constant or a result up to `most` needs."""
    values = list(map(number, operands))
    constants = (abs(x) + (x > 0) for x in values if type(x) is int)
    if max(most, *constants, 0) <= _INT32:
        return values
    return [
        y.to(LANGUAGE.int64) if isinstance(y, Symbol) and not x.dtype.is_floating_point else y
        for x, y in zip(operands, values, strict=True)
    ]


def _product(combine: Callable[[Any, Any], Any], x: Any, y: Any, most: int) -> Element:
    dtype, natural = _common(x, y), _natural(x) and _natural(y)
    values = _numbers(x, y, most=most if dtype == torch.int64 else 0)
    return Element(combine(*values), dtype, natural, most)


def fraction(x: Any) -> Any:
    """The value of an operand as a float; half precision becomes fp32."""
    value = number(x)
    if not isinstance(value, Symbol):
        return float(value)
    return value if x.dtype in (torch.float32, torch.float64) else value.to(LANGUAGE.float32)


def truth(x: Any) -> Any:
    """The value of an operand as a bool."""
    value = _value(x)
    if not isinstance(value, Symbol):
        return bool(value)
    zero: Any = 0
    return value if x.dtype == torch.bool else value != zero


def is_integer(x: Any) -> bool:
    """Whether an operand can be an index."""
    if isinstance(x, Element):
        return not x.dtype.is_floating_point and x.dtype != torch.bool
    return type(x) is int


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a function of fractions."""
    return dtype if dtype == torch.float64 else torch.float32


def _natural(x: Any) -> bool:
    return x.natural if isinstance(x, Element) else x >= 0


@_records("add")
def _add(x: Any, y: Any, *, alpha: Any = 1) -> Element:
    dtype = _common(x, y)
    if dtype == torch.bool:
        return _either(x, y)
    y = y if alpha == 1 else _mul(y, alpha)
    total = operator.add(*_numbers(x, y))
    return Element(total, dtype, _natural(x) and _natural(y), _most(x) + _most(y))


@_records("sub", "subtract")
def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Element:
    y = y if alpha == 1 else _mul(y, alpha)
    return Element(operator.sub(*_numbers(x, y)), _common(x, y), most=_most(x) + _most(y))


@_records("mul", "multiply")
def _mul(x: Any, y: Any) -> Element:
    return _product(operator.mul, x, y, _most(x) * _most(y))


@_records("truediv", "div", "true_divide", "divide")
def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Element:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    dtype = _common(x, y)
    if rounding_mode is None:
        return Element(fraction(x) / fraction(y), _real(dtype))
    if not dtype.is_floating_point:
        return Element(operator.floordiv(*_numbers(x, y)), dtype, most=_most(x))
    ratio = fraction(x) / fraction(y)
    whole = LANGUAGE.where(ratio < 0, LANGUAGE.ceil(ratio), LANGUAGE.floor(ratio))
    return Element(whole, _real(dtype))


def _bits_of(y: Any) -> int | None:
    """n of a divisor 2^n."""
    y = _value(y)
    return y.bit_length() - 1 if type(y) is int and y > 0 and not y & (y - 1) else None


@_records("floordiv", "floor_divide")
def _floor_divide(x: Any, y: Any) -> Element:
    dtype, bits = _common(x, y), _bits_of(y)
    natural = _natural(x) and _natural(y)
    if dtype.is_floating_point:
        return Element(LANGUAGE.floor(fraction(x) / fraction(y)), _real(dtype))
    below, by = _numbers(x, y)
    if bits is not None:
        return Element(below >> bits, dtype, natural, _most(x))
    below = below if natural else below - number(_remainder(x, y))
    return Element(below // by, dtype, natural, _most(x))


@_records("mod", "remainder")
def _remainder(x: Any, y: Any) -> Element:
    dtype, bits = _common(x, y), _bits_of(y)
    if dtype.is_floating_point:
        return _sub(x, _mul(_floor_divide(x, y), y))
    left, by = _numbers(x, y)
    if bits is not None:
        return Element(left & (2**bits - 1), dtype, True, 2**bits)
    left = left % by
    if _natural(x) and _natural(y):
        return Element(left, dtype, True, _most(y))
    wrong = left < 0 if _natural(y) else (left != 0) & ((left < 0) != (by < 0))
    return Element(LANGUAGE.where(wrong, left + by, left), dtype, _natural(y), _most(y))


@_records("pow", "float_power")
def _pow(x: Any, y: Any) -> Element:
    dtype, power, base = _common(x, y), _value(y), _value(x)
    if type(power) is int and 1 <= power <= 4:
        result = x
        for _ in range(power - 1):
            result = _mul(result, x)
        return _mul(result, 1)
    if not dtype.is_floating_point:
        raise NotTranslated("raises integers to a power that is not one of 1, 2, 3 and 4")
    if not isinstance(base, Symbol) and base > 0:
        return Element(LANGUAGE.exp(fraction(y) * LANGUAGE.log(float(base))), _real(dtype))
    return Element(LANGUAGE.pow(fraction(x), fraction(y)), _real(dtype))


def _comparison(compare: Callable[[Any, Any], Any]) -> _Function:
    return lambda x, y: Element(compare(*_numbers(x, y)), torch.bool)


for _name, _other in (
    *(("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")),
    *(("eq", "eq"), ("ne", "not_equal")),
):
    _records(_name, _other)(_comparison(getattr(operator, _name)))


def _bits(combine: Callable[[Any, Any], Any], name: str) -> _Function:
    """&, | or ^ of bools or of integers; with a constant bool it is decided."""

    def apply(x: Any, y: Any) -> Element:
        dtype = _common(x, y)
        if dtype != torch.bool:
            natural = (any if name == "and" else all)(map(_natural, (x, y)))
            return Element(combine(*_numbers(x, y)), dtype, natural)
        if isinstance(_value(x), bool):
            x, y = y, x
        if isinstance(_value(y), bool) and not isinstance(_value(x), bool):
            kept = {"and": _value(y), "or": not _value(y)}.get(name)
            if kept is not None:
                return Element(_value(x) if kept else _value(y), torch.bool)
        return Element(combine(_value(x), _value(y)), torch.bool)

    _records(name, f"bitwise_{name}")(apply)
    _records(f"logical_{name}")(
        lambda x, y: apply(*(Element(truth(z), torch.bool) for z in (x, y)))
    )
    return apply


_bits(operator.and_, "and")
_either = _bits(operator.or_, "or")
_bits(operator.xor, "xor")


@_records("lshift", "bitwise_left_shift")
def _left_shift(x: Any, y: Any) -> Element:
    bits = _value(y)
    return _product(operator.lshift, x, y, _most(x) << (bits if type(bits) is int else 32))


@_records("rshift", "bitwise_right_shift")
def _right_shift(x: Any, y: Any) -> Element:
    bits = _value(y)
    far = type(bits) is not int or bits > 31
    value = operator.rshift(*_numbers(x, y, most=2 * _INT32 if far else 0))
    return Element(value, _common(x, y), _natural(x), _most(x))


@_records("invert", "bitwise_not")
def _invert(x: Any) -> Element:
    if x.dtype == torch.bool:
        return _logical_not(x)
    return Element(~x.value, x.dtype)


@_records("logical_not")
def _logical_not(x: Any) -> Element:
    value = truth(x)
    return Element(~value if isinstance(value, Symbol) else not value, torch.bool)


@_records("where")
def _where(condition: Any, x: Any, y: Any) -> Element:
    kept = truth(condition)
    if not isinstance(kept, Symbol):
        x, y = (x, y) if kept else (y, x)
        return _mul(x, 1) if not isinstance(x, Element) else x
    dtype = _common(x, y)
    values = map(truth, (x, y)) if dtype == torch.bool else _numbers(x, y)
    chosen = LANGUAGE.where(kept, *values)
    return Element(chosen, dtype, dtype != torch.bool and _natural(x) and _natural(y))


@_records("maximum", "fmax", "clamp_min")
def _maximum(x: Any, y: Any) -> Element:
    chosen = LANGUAGE.maximum(*_numbers(x, y))
    return Element(chosen, _common(x, y), _natural(x) or _natural(y))


@_records("minimum", "fmin", "clamp_max")
def _minimum(x: Any, y: Any) -> Element:
    chosen = LANGUAGE.minimum(*_numbers(x, y))
    return Element(chosen, _common(x, y), _natural(x) and _natural(y))


@_records("clamp", "clip")
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else _maximum(x, min)
    return x if max is None else _minimum(x, max)


@_records("neg", "negative")
def _neg(x: Any) -> Element:
    return Element(-number(x), x.dtype, most=x.most)


@_records("abs", "absolute")
def _abs(x: Any) -> Element:
    return x if x.natural else Element(abs(number(x)), x.dtype, True, x.most)


_records("pos", "positive")(lambda x: x)
_records("relu")(lambda x, inplace=False: _maximum(x, 0))
_records("silu")(lambda x, inplace=False: _mul(x, apply("sigmoid", x)))
_records("gelu")(lambda x: _mul(x, apply("erf", _mul(x, 0.5**0.5)) * 0.5 + 0.5))
_records("square")(lambda x: _mul(x, x))
_records("reciprocal")(lambda x: _div(1.0, x))
_records("sign", "sgn")(
    lambda x: Element(LANGUAGE.where(x.value > 0, 1, LANGUAGE.where(x.value < 0, -1, 0)), x.dtype)
)


def _of_fraction(name: str) -> _Function:
    return lambda x: Element(getattr(LANGUAGE, name)(fraction(x)), _real(x.dtype))


for _name in (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "erf", "erfc"),
):
    _records(_name)(_of_fraction(_name))


@_records("tanh")
def _tanh(x: Any) -> Element:
    """tanh to fp32 accuracy without libdevice, as softcaps have it; constant from 10 on."""
    real, near = fraction(x), LANGUAGE.where
    at = near(real > 10.0, 10.0, near(real < -10.0, -10.0, real))
    square = at * at
    series = at * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    quotient = 1 - 2 / (LANGUAGE.exp(2 * at) + 1)
    return Element(near(square < 0.04, series, quotient), _real(x.dtype))


for _name, _inner in (("floor", "floor"), ("ceil", "ceil"), ("round", "rint")):
    _records(_name)(
        lambda x, of=_of_fraction(_inner): of(x) if x.dtype.is_floating_point else x  # noqa: B008
    )
_records("trunc", "fix")(lambda x: _div(x, 1, rounding_mode="trunc"))
_records("isnan")(lambda x: Element(x.value != x.value, torch.bool))
_records("isinf")(lambda x: Element(abs(fraction(x)) == float("inf"), torch.bool))


@_records("to", "type")
def _to(x: Any, *args: Any, dtype: Any = None, **_: Any) -> Element:
    """Cast; devices, layouts and copies are of no concern."""
    for y in args:
        dtype = y if isinstance(y, torch.dtype) else y.dtype if isinstance(y, Element) else dtype
    if dtype is None or dtype == x.dtype:
        return x
    if dtype == torch.bool:
        return Element(truth(x), dtype)
    value = number(x)
    if isinstance(value, Symbol):
        value = value.to(getattr(LANGUAGE, str(dtype).removeprefix("torch.")))
    else:
        value = float(value) if dtype.is_floating_point else int(value)
    return Element(value, dtype, x.natural)


for _name, _to_dtype in {
    **{"float": torch.float32, "double": torch.float64, "half": torch.float16},
    **{"bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "bool": torch.bool},
}.items():
    _records(_name)(partial(_to, dtype=_to_dtype))
_records("type_as")(lambda x, y: _to(x, y.dtype))


def _constant(value: Any) -> _Function:
    """A constant in the dtype of an element, or in another one."""

    def made(x: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Element:
        return _to(Element(value, torch.float64), dtype or x.dtype)

    return made


_records("ones_like", "new_ones")(_constant(1))
_records("zeros_like", "new_zeros")(_constant(0))
_records("full_like")(lambda x, value, dtype=None, **_: _constant(value)(x, dtype=dtype))
_records("new_full")(lambda x, size, value, dtype=None, **_: _constant(value)(x, dtype=dtype))

for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift"),
):
    setattr(Element, f"__{_name}__", lambda x, y, name=_name: apply(name, x, y))
    setattr(Element, f"__r{_name}__", lambda x, y, name=_name: apply(name, y, x))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Element, f"__{_name}__", lambda x, y, name=_name: apply(name, x, y))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Element, f"__{_name}__", lambda x, name=_name: apply(name, x))
