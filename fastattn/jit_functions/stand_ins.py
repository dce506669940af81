"""Run the Python function of a @triton.jit function with another language than Triton's.

Triton's language and other @triton.jit functions in its globals are replaced by stand-ins.
"""

import builtins
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any


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
    return over(language, x) if kind.__module__.startswith("triton.") else x
