"""Run the Python function of a @triton.jit function with another language than Triton's.

Triton's language and other @triton.jit functions in its globals are replaced by stand-ins.
"""

import builtins
import operator
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any


def is_jit(x: Any) -> bool:
    """Whether x is an object of Triton's, as a @triton.jit function is."""
    # torch 2.11 traces no `__module__` of the type of functions.
    return not isinstance(x, FunctionType) and type(x).__module__.startswith("triton.")


class Language:
    """Parts of `triton.language` that are the same with any stand-in for its values."""

    @property
    def math(self) -> "Language":
        return self

    extra = libdevice = cuda = hip = math

    constexpr = staticmethod(lambda x: x)
    static_assert = static_print = staticmethod(lambda *_, **__: None)
    static_range = range = range
    abs = staticmethod(abs)
    cast = staticmethod(lambda x, dtype: x.to(dtype))
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)
    add, sub, mul = map(staticmethod, (operator.add, operator.sub, operator.mul))
    logical_and = staticmethod(lambda x, y: (x != 0) & (y != 0))
    logical_or = staticmethod(lambda x, y: (x != 0) | (y != 0))
    PropagateNan = SimpleNamespace(NONE=False, ALL=True)


def over(language: Any, mod: Any) -> Callable[..., Any]:
    """The Python function of a @triton.jit function, with `language` for triton.language."""
    python: FunctionType = mod.fn
    code = python.__code__
    scope = {
        name: _stand_in(language, python.__globals__[name])
        for name in _names(code)
        if name in python.__globals__
    }
    cells = tuple(
        CellType(_stand_in(language, cell.cell_contents)) for cell in python.__closure__ or ()
    )
    scope["__builtins__"] = builtins
    # Keyword-only parameters have no defaults here: Triton's compiler takes none.
    defaults = tuple(_stand_in(language, x) for x in python.__defaults__ or ())
    return FunctionType(code, scope, python.__name__, defaults, cells)


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *(name for inner in nested for name in _names(inner))}


def _stand_in(language: Any, x: Any) -> Any:
    """Replace x, a global or default of a user's function, by its counterpart in the language."""
    if isinstance(x, ModuleType):
        if x.__name__ == "triton":
            return SimpleNamespace(language=language, cdiv=language.cdiv)
        return language if x.__name__.startswith("triton.language") else x
    kind = type(x)
    if (getattr(x, "__module__", None) or "").startswith("triton.language"):
        name = str(x) if kind.__name__ == "dtype" else getattr(x, "__name__", "")
        return x.value if kind.__name__ == "constexpr" else getattr(language, name)
    return over(language, x) if is_jit(x) else x
