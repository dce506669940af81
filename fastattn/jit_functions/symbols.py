"""Operations of Triton on single numbers, recorded as a graph and written as source."""

import hashlib
import linecache
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import generated, stand_ins


class NotDifferentiable(Exception):
    """A score_mod has an operation without a known derivative; the message names it."""


class Symbol:
    """A value in the function: an operation and its operands.

    text: source, with {} for the operands. active: depends on the score or a load of floats.
    """

    text: str
    operands: tuple[Any, ...]
    active: bool
    rule: Any

    def __init__(
        self, text: str, *operands: Any, active: bool | None = None, rule: Any = None
    ) -> None:
        self.text, self.operands, self.rule = text, operands, rule
        symbols = [x for x in operands if isinstance(x, Symbol)]
        self.active = any(x.active for x in symbols) if active is None else active

    def to(self, dtype: Any, **_: Any) -> "Symbol":
        """Cast; a cast to an int has no derivative."""
        if not isinstance(dtype, _Dtype):
            raise NotDifferentiable(f"it casts to {dtype}")
        if not dtype.is_float:
            return Symbol(f"({{}}).to(tl.{dtype.name})", self, active=False)
        return Symbol(f"({{}}).to(tl.{dtype.name})", self, rule=lambda y, dy, x: [dy])

    def __bool__(self) -> bool:
        raise NotDifferentiable("it branches on a value; use tl.where")

    def __neg__(self) -> "Symbol":
        return Symbol("-({})", self, rule=lambda y, dy, x: [-dy])

    def __abs__(self) -> "Symbol":
        return call("abs", lambda y, dy, x: [where(x < 0, -dy, where(x > 0, dy, 0.0))])(self)

    def __invert__(self) -> "Symbol":
        return Symbol("~({})", self, active=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(getattr(LANGUAGE, name), self)


class _Dtype(NamedTuple):
    name: str
    is_float: bool


class Load(NamedTuple):
    """An element of a float tensor: the tensor and the offset."""

    tensor: Any
    offset: Any
    symbol: Symbol


class Pointer:
    def __init__(self, tensor: Any, is_float: bool, offset: Any, loads: list[Load]) -> None:
        self.tensor, self.is_float, self.offset, self.loads = tensor, is_float, offset, loads

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.tensor, self.is_float, self.offset + steps, self.loads)

    __radd__ = __add__

    def __sub__(self, steps: Any) -> "Pointer":
        return Pointer(self.tensor, self.is_float, self.offset - steps, self.loads)

    def load(self, mask: Any, other: Any) -> Symbol:
        """The element; its derivative is 0 if mask is False."""
        text = f"tl.load(tensor_{self.tensor} + ({{}})"
        operands = [self.offset]
        for name, x in (("mask", mask), ("other", other)):
            if x is not None:
                text += f", {name}={{}}"
                operands.append(x)
        loaded = Symbol(text + ")", *operands, active=self.is_float)
        if self.is_float:
            self.loads.append(Load(self.tensor, self.offset, loaded))
        if mask is None or not self.is_float:
            return loaded
        return Symbol("{}", loaded, mask, rule=lambda y, dy, x, keep: [where(keep, dy, 0.0), None])


def _guarded(dy: Any, factor: Any) -> Any:
    """dy * factor, 0 if dy is 0: factor may be infinite if tl.where chose another branch."""
    return where(dy == 0.0, 0.0, dy * factor)


_Rule = Callable[..., list[Any]]
# The operator, and both operands' gradients from y, dy and the operands.
_OPERATORS: dict[str, tuple[str, _Rule | None]] = {
    "add": ("+", lambda y, dy, a, b: [dy, dy]),
    "sub": ("-", lambda y, dy, a, b: [dy, -dy]),
    "mul": ("*", lambda y, dy, a, b: [dy * b, dy * a]),
    "truediv": ("/", lambda y, dy, a, b: [_guarded(dy, 1.0 / b), _guarded(dy, -y / b)]),
    "mod": ("%", lambda y, dy, a, b: [dy, _guarded(dy, (y - a) / b)]),
    **{
        name: (symbol, None)
        for name, symbol in zip(
            ("floordiv", "lshift", "rshift", "and", "or", "xor"),
            ("//", "<<", ">>", "&", "|", "^"),
            strict=True,
        )
    },
    **{
        name: (symbol, None)
        for name, symbol in zip(
            ("lt", "le", "gt", "ge", "eq", "ne"), ("<", "<=", ">", ">=", "==", "!="), strict=True
        )
    },
}


def _binary(symbol: str, rule: _Rule | None, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return NotImplemented
    return Symbol(f"({{}}) {symbol} ({{}})", a, b, active=None if rule else False, rule=rule)


for _name, (_symbol, _rule) in _OPERATORS.items():
    _forward = partial(_binary, _symbol, _rule)
    setattr(Symbol, f"__{_name}__", lambda a, b, f=_forward: f(a, b))
    setattr(Symbol, f"__r{_name}__", lambda a, b, f=_forward: f(b, a))


def call(name: str, rule: _Rule | None) -> Callable[..., Any]:
    """A function of triton.language, or else of its libdevice."""

    def apply(*operands: Any, **_: Any) -> Any:
        if not any(isinstance(x, Symbol) for x in operands) and hasattr(math, name):
            return getattr(math, name)(*operands)
        home = "tl" if hasattr(generated.tl, name) else "libdevice"
        text = f"{home}.{name}({', '.join('{}' for _ in operands)})"
        return Symbol(text, *operands, active=None if rule else False, rule=rule)

    return apply


def where(condition: Any, x: Any, y: Any) -> Any:
    def rule(result: Any, dy: Any, condition: Any, x: Any, y: Any) -> list[Any]:
        return [None, where(condition, dy, 0.0), where(condition, 0.0, dy)]

    return call("where", rule)(condition, x, y)


def _exp(x: Any) -> Any:
    return call("exp", lambda y, dy, x: [dy * y])(x)


def _unary(factor: Callable[[Any, Any], Any], guarded: bool = False) -> _Rule:
    """Rule of a function of x with the derivative factor(y, x); guarded: it may be infinite."""
    if guarded:
        return lambda y, dy, x: [_guarded(dy, factor(y, x))]
    return lambda y, dy, x: [dy * factor(y, x)]


def _log(x: Any) -> Any:
    return call("log", _unary(lambda y, x: 1.0 / x, True))(x)


def _rsqrt(x: Any) -> Any:
    return call("rsqrt", _unary(lambda y, x: -0.5 * y * y * y, True))(x)


def _of_power(y: Any, dy: Any, a: Any, b: Any) -> list[Any]:
    of_base = _guarded(dy, b * call("pow", _of_power)(a, b - 1.0))
    return [of_base, _guarded(dy, y * _log(a)) if isinstance(b, Symbol) and b.active else None]


_ERF = 2.0 / math.sqrt(math.pi)
_LN2, _LN10 = math.log(2.0), math.log(10.0)
_RULES: dict[str, _Rule | None] = {
    "exp2": _unary(lambda y, x: y * _LN2),
    "expm1": _unary(lambda y, x: y + 1.0),
    "log2": _unary(lambda y, x: 1.0 / (x * _LN2), True),
    "log10": _unary(lambda y, x: 1.0 / (x * _LN10), True),
    "log1p": _unary(lambda y, x: 1.0 / (1.0 + x), True),
    "sqrt": _unary(lambda y, x: 0.5 / y, True),
    "sqrt_rn": _unary(lambda y, x: 0.5 / y, True),
    "sin": _unary(lambda y, x: call("cos", None)(x)),
    "cos": _unary(lambda y, x: -call("sin", None)(x)),
    "tan": _unary(lambda y, x: 1.0 + y * y),
    "tanh": _unary(lambda y, x: 1.0 - y * y),
    "sinh": _unary(lambda y, x: 0.5 * (_exp(x) + _exp(-x))),
    "cosh": _unary(lambda y, x: 0.5 * (_exp(x) - _exp(-x))),
    "asin": _unary(lambda y, x: _rsqrt(1.0 - x * x), True),
    "acos": _unary(lambda y, x: -_rsqrt(1.0 - x * x), True),
    "atan": _unary(lambda y, x: 1.0 / (1.0 + x * x)),
    "asinh": _unary(lambda y, x: _rsqrt(1.0 + x * x)),
    "sigmoid": _unary(lambda y, x: y * (1.0 - y)),
    "erf": _unary(lambda y, x: _ERF * _exp(-x * x)),
    "erfc": _unary(lambda y, x: -_ERF * _exp(-x * x)),
    "maximum": lambda y, dy, a, b: [where(a >= b, dy, 0.0), where(a >= b, 0.0, dy)],
    "minimum": lambda y, dy, a, b: [where(a <= b, dy, 0.0), where(a <= b, 0.0, dy)],
    "fma": lambda y, dy, a, b, c: [dy * b, dy * a, dy],
    "pow": _of_power,
    **dict.fromkeys(("floor", "ceil", "trunc", "rint", "isnan", "isinf"), None),
}


class _Language(stand_ins.Language):
    """Stand-in for `triton.language`: each call makes a `Symbol`."""

    where = staticmethod(where)
    exp, log, rsqrt = staticmethod(_exp), staticmethod(_log), staticmethod(_rsqrt)

    def clamp(self, x: Any, low: Any, high: Any, **_: Any) -> Any:
        return self.minimum(self.maximum(x, low), high)

    fdiv = div_rn = staticmethod(lambda x, y: x / y)
    zeros_like = staticmethod(lambda x: Symbol("tl.zeros_like({})", x, active=False))

    @staticmethod
    def load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Symbol:
        if not isinstance(pointer, Pointer):
            raise NotDifferentiable("tl.load takes one of the mod_tensors, plus an offset")
        return pointer.load(mask, other)

    def __getattr__(self, name: str) -> Any:
        if name in _RULES:
            return call(name, _RULES[name])
        if name.startswith(("float", "bfloat", "int", "uint", "fp", "bf")):
            return _Dtype(name, not name.startswith(("int", "uint")))
        raise NotDifferentiable(f"of tl.{name} no derivative is known")


LANGUAGE = _Language()


def ordered(*roots: Any) -> list[Symbol]:
    """All nodes below the roots, operands first."""
    order: dict[Symbol, None] = {}
    waiting = [(x, False) for x in reversed(roots)]
    while waiting:
        x, seen = waiting.pop()
        if not isinstance(x, Symbol) or x in order:
            continue
        if seen:
            order[x] = None
        else:
            waiting.append((x, True))
            waiting += [(y, False) for y in reversed(x.operands)]
    return list(order)


def function(name: str, parameters: Sequence[str], *roots: Any) -> Any:
    """The @triton.jit function of these parameters that returns the roots.

    Equal sources share one function, in the module `generated`. name: begins the function's name.
    """
    names: dict[Symbol, str] = {}
    lines: list[str] = []

    def text(x: Any) -> str:
        if isinstance(x, Symbol):
            return names[x]
        return f'float("{x}")' if isinstance(x, float) and not math.isfinite(x) else repr(x)

    for x in ordered(*roots):
        if not x.operands:
            names[x] = x.text
            continue
        names[x] = f"t{len(lines)}"
        lines.append(f"    {names[x]} = {x.text.format(*map(text, x.operands))}\n")
    body = f"({', '.join(parameters)}):\n{''.join(lines)}    return {', '.join(map(text, roots))}\n"
    name += f"_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    if not hasattr(generated, name):
        source = f"@triton.jit\ndef {name}{body}"
        # Triton reads the source of a function through linecache.
        file = f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), generated.__dict__)
    return getattr(generated, name)
