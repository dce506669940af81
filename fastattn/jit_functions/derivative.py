"""Derivatives of users' score functions, as generated source.

A score_mod runs once on `Symbol`s, which record each operation. Reverse accumulation over this
graph gives the gradients of the score and of every element loaded from a float tensor, as further
nodes. A @triton.jit function is generated from the operations that they need.
"""

import hashlib
import linecache
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from . import generated, stand_ins

ARGUMENTS = ("x", "b", "h", "q_pos", "k_pos")


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
        return _call("abs", lambda y, dy, x: [_where(x < 0, -dy, _where(x > 0, dy, 0.0))])(self)

    def __invert__(self) -> "Symbol":
        return Symbol("~({})", self, active=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(getattr(_LANGUAGE, name), self)


class _Dtype(NamedTuple):
    name: str
    is_float: bool


class Load(NamedTuple):
    """An element of a float tensor: the tensor and the offset."""

    tensor: int
    offset: Any
    symbol: Symbol


class _Pointer:
    def __init__(self, tensor: int, is_float: bool, offset: Any, loads: list[Load]) -> None:
        self.tensor, self.is_float, self.offset, self.loads = tensor, is_float, offset, loads

    def __add__(self, steps: Any) -> "_Pointer":
        return _Pointer(self.tensor, self.is_float, self.offset + steps, self.loads)

    __radd__ = __add__

    def __sub__(self, steps: Any) -> "_Pointer":
        return _Pointer(self.tensor, self.is_float, self.offset - steps, self.loads)

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
        return Symbol("{}", loaded, mask, rule=lambda y, dy, x, keep: [_where(keep, dy, 0.0), None])


def _guarded(dy: Any, factor: Any) -> Any:
    """dy * factor, 0 if dy is 0: factor may be infinite if tl.where chose another branch."""
    return _where(dy == 0.0, 0.0, dy * factor)


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
    if isinstance(a, _Pointer) or isinstance(b, _Pointer):
        return NotImplemented
    return Symbol(f"({{}}) {symbol} ({{}})", a, b, active=None if rule else False, rule=rule)


for _name, (_symbol, _rule) in _OPERATORS.items():
    _forward = partial(_binary, _symbol, _rule)
    setattr(Symbol, f"__{_name}__", lambda a, b, f=_forward: f(a, b))
    setattr(Symbol, f"__r{_name}__", lambda a, b, f=_forward: f(b, a))


def _call(name: str, rule: _Rule | None) -> Callable[..., Any]:
    """A function of triton.language, or else of its libdevice."""

    def apply(*operands: Any, **_: Any) -> Any:
        import triton.language as tl

        if not any(isinstance(x, Symbol) for x in operands) and hasattr(math, name):
            return getattr(math, name)(*operands)
        home = "tl" if hasattr(tl, name) else "libdevice"
        text = f"{home}.{name}({', '.join('{}' for _ in operands)})"
        return Symbol(text, *operands, active=None if rule else False, rule=rule)

    return apply


def _where(condition: Any, x: Any, y: Any) -> Any:
    def rule(result: Any, dy: Any, condition: Any, x: Any, y: Any) -> list[Any]:
        return [None, _where(condition, dy, 0.0), _where(condition, 0.0, dy)]

    return _call("where", rule)(condition, x, y)


def _exp(x: Any) -> Any:
    return _call("exp", lambda y, dy, x: [dy * y])(x)


def _unary(factor: Callable[[Any, Any], Any], guarded: bool = False) -> _Rule:
    """Rule of a function of x with the derivative factor(y, x); guarded: it may be infinite."""
    if guarded:
        return lambda y, dy, x: [_guarded(dy, factor(y, x))]
    return lambda y, dy, x: [dy * factor(y, x)]


def _log(x: Any) -> Any:
    return _call("log", _unary(lambda y, x: 1.0 / x, True))(x)


def _rsqrt(x: Any) -> Any:
    return _call("rsqrt", _unary(lambda y, x: -0.5 * y * y * y, True))(x)


def _of_power(y: Any, dy: Any, a: Any, b: Any) -> list[Any]:
    of_base = _guarded(dy, b * _call("pow", _of_power)(a, b - 1.0))
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
    "sin": _unary(lambda y, x: _call("cos", None)(x)),
    "cos": _unary(lambda y, x: -_call("sin", None)(x)),
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
    "maximum": lambda y, dy, a, b: [_where(a >= b, dy, 0.0), _where(a >= b, 0.0, dy)],
    "minimum": lambda y, dy, a, b: [_where(a <= b, dy, 0.0), _where(a <= b, 0.0, dy)],
    "fma": lambda y, dy, a, b, c: [dy * b, dy * a, dy],
    "pow": _of_power,
    **dict.fromkeys(("floor", "ceil", "trunc", "rint", "isnan", "isinf"), None),
}


class _Language:
    """Stand-in for `triton.language`: each call makes a `Symbol`."""

    @property
    def math(self) -> "_Language":
        return self

    extra = libdevice = cuda = hip = math

    constexpr = staticmethod(lambda x: x)
    static_assert = static_print = staticmethod(lambda *_, **__: None)
    static_range = range = range
    where = staticmethod(_where)
    exp, log, rsqrt = staticmethod(_exp), staticmethod(_log), staticmethod(_rsqrt)
    abs = staticmethod(abs)
    cast = staticmethod(lambda x, dtype: x.to(dtype))
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)

    def clamp(self, x: Any, low: Any, high: Any, **_: Any) -> Any:
        return self.minimum(self.maximum(x, low), high)

    fdiv = div_rn = staticmethod(lambda x, y: x / y)
    add, sub, mul = map(staticmethod, (operator.add, operator.sub, operator.mul))
    zeros_like = staticmethod(lambda x: Symbol("tl.zeros_like({})", x, active=False))
    logical_and = staticmethod(lambda x, y: (x != 0) & (y != 0))
    logical_or = staticmethod(lambda x, y: (x != 0) | (y != 0))
    PropagateNan = SimpleNamespace(NONE=False, ALL=True)

    @staticmethod
    def load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Symbol:
        if not isinstance(pointer, _Pointer):
            raise NotDifferentiable("tl.load takes one of the mod_tensors, plus an offset")
        return pointer.load(mask, other)

    def __getattr__(self, name: str) -> Any:
        if name in _RULES:
            return _call(name, _RULES[name])
        if name.startswith(("float", "bfloat", "int", "uint", "fp", "bf")):
            return _Dtype(name, not name.startswith(("int", "uint")))
        raise NotDifferentiable(f"of tl.{name} no derivative is known")


_LANGUAGE = _Language()


class Graph(NamedTuple):
    """A score_mod as a graph, after reverse accumulation.

    dx: the gradient of the score, from the Symbol "dx". loads, of_loads: loads of floats, and their
    gradients.
    """

    dx: Any
    loads: list[Load]
    of_loads: list[Any]


def differentiated(mod: Any, tensors: Sequence[Tensor]) -> Graph:
    """The graph of score_mod(x, b, h, q_pos, k_pos, *tensors) and of its gradients.

    Raises:
        NotDifferentiable: an operation has no known derivative.
    """
    loads: list[Load] = []
    leaves = [Symbol(name, active=name == "x") for name in ARGUMENTS]
    pointers = [_Pointer(n, x.dtype.is_floating_point, 0, loads) for n, x in enumerate(tensors)]
    try:
        result = stand_ins.over(_LANGUAGE, mod)(*leaves, *pointers)
    except (TypeError, AttributeError, RecursionError) as error:
        raise NotDifferentiable(f"it does what cannot be followed: {error}") from error
    dy: Any = Symbol("dx", active=False)
    of: dict[Any, Any] = _accumulated(result, dy) if isinstance(result, Symbol) else {}
    zero = dy * 0.0
    return Graph(of.get(leaves[0], zero), loads, [of.get(load.symbol, zero) for load in loads])


def _ordered(*roots: Any) -> list[Symbol]:
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


def _accumulated(root: Symbol, dy: Any) -> dict[Symbol, Any]:
    """The gradient of each active symbol below the root."""
    of: dict[Symbol, Any] = {root: dy}
    for y in reversed(_ordered(root)):
        if not y.active or y.rule is None or y not in of:
            continue
        for x, dx in zip(y.operands, y.rule(y, of[y], *y.operands), strict=True):
            if isinstance(x, Symbol) and x.active and dx is not None:
                of[x] = of[x] + dx if x in of else dx
    return of


def source(name: str, tensors: int, *roots: Any) -> str:
    """Source of a @triton.jit function (dx, x, b, h, q_pos, k_pos, *tensors): the roots."""
    names: dict[Symbol, str] = {}
    lines: list[str] = []

    def text(x: Any) -> str:
        if isinstance(x, Symbol):
            return names[x]
        return f'float("{x}")' if isinstance(x, float) and not math.isfinite(x) else repr(x)

    for x in _ordered(*roots):
        if not x.operands:
            names[x] = x.text
            continue
        names[x] = f"t{len(lines)}"
        lines.append(f"    {names[x]} = {x.text.format(*map(text, x.operands))}\n")
    parameters = ", ".join(("dx", *ARGUMENTS, *(f"tensor_{n}" for n in range(tensors))))
    head = f"@triton.jit\ndef {name}({parameters}):\n"
    return f"{head}{''.join(lines)}    return {', '.join(map(text, roots))}\n"


def score_mod_grad(mod: Any, tensors: Sequence[Tensor]) -> Any:
    """The score_mod_grad of a score_mod, as a @triton.jit function.

    Equal sources share one function. The source is derived in each call: globals may have changed.

    Raises:
        NotDifferentiable: an operation has no known derivative.
    """
    return _function(source("NAME", len(tensors), differentiated(mod, tensors).dx))


def load_gradients(
    mod: Any, tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Any, list[int]]:
    """Gradients of the loads from wanted tensors: a @triton.jit function, and each load's tensor.

    The function has the arguments of score_mod_grad, and returns for each load its offset and its
    gradient, in turn. An offset has size 1 along positions that it does not depend on.

    Raises:
        NotDifferentiable: an operation has no known derivative.
    """
    graph = differentiated(mod, tensors)
    roots: list[Any] = []
    read: list[int] = []
    for load, gradient in zip(graph.loads, graph.of_loads, strict=True):
        if wanted[load.tensor]:
            # A constant offset becomes a value too.
            offset = Symbol("{} * 0 + {}", Symbol("b", active=False), load.offset)
            roots += [offset, gradient]
            read.append(load.tensor)
    return _function(source("NAME", len(tensors), *roots)), read


def _function(text: str) -> Any:
    """Define the function of a source in the module `generated`."""
    name = f"score_mod_grad_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not hasattr(generated, name):
        text = text.replace("NAME", name, 1)
        # Triton reads the source of a function through linecache.
        file = f"<{name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), generated.__dict__)
    return getattr(generated, name)
