"""Integer constants in the code of a module's forward, such as the width of a window."""

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def numbers_in_code(kind: type) -> set[int]:
    """Those above 1 in `forward` of a class, and in the functions of its own code that it names.

    Constants, globals, defaults of arguments and variables of enclosing functions; not torch's.
    """
    found: set[int] = set()
    seen: set[CodeType] = set()
    waiting: list[Any] = [getattr(kind, "forward", None)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.add(value)
        elif isinstance(value, tuple):
            waiting.extend(value)
        elif isinstance(value, FunctionType) and not str(value.__module__).startswith("torch"):
            waiting.extend(value.__defaults__ or ())
            waiting.extend((value.__kwdefaults__ or {}).values())
            for cell in value.__closure__ or ():
                waiting.append(cell.cell_contents)
            for code in _codes(value.__code__, seen):
                waiting.extend(code.co_consts)
                for name in code.co_names:
                    waiting += [getattr(kind, name, None), value.__globals__.get(name)]
    return found


def _codes(code: CodeType, seen: set[CodeType]) -> Iterator[CodeType]:
    """A function's code and that of the functions and comprehensions in it, each once."""
    if code in seen:
        return
    seen.add(code)
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant, seen)
