"""Names in the code of a module's forward, for reports and to choose candidates of capture."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from dis import get_instructions
from functools import cache, cached_property, partial
from itertools import takewhile
from traceback import FrameSummary
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..torch_sdpa import is_torchs_attention

SDPA = "scaled_dot_product_attention"
SOFTMAX = frozenset({"softmax", "Softmax", "_softmax", "softmax_one"})
PRODUCTS = frozenset({"@", "matmul", "bmm", "baddbmm", "einsum"})
_SOFTMAXES = {id(x) for x in (torch.softmax, F.softmax, nn.Softmax)}
_WRAPPERS = (staticmethod, classmethod, property, cached_property, partial, MethodType)
_WRAPPED = ("__func__", "__self__", "fget", "func", "args", "keywords")
# Larger containers hold data.
_MANY = 256


def names_in(module: nn.Module) -> frozenset[str]:
    """Names in the code that a module's forward reaches, but for the forwards of its parts.

    Followed are its package and files that are not installed. An attribute is looked up by its name
    in each class, object and file that the code names.
    """
    package = _package(type(module).__module__)
    names, seen = {"forward"}, dict[int, Any]()
    spaces: list[Any] = [vars(module), module._modules, *_bodies(type(module), package)]
    waiting: list[Any] = []
    while True:
        waiting += [space[name] for space in spaces for name in names & space.keys()]
        new = {id(x): x for x in waiting if id(x) not in seen}
        if not new:
            return frozenset(names)
        seen |= new
        waiting = [y for x in new.values() for y in _followed(x, package, names, spaces)]


def _followed(x: Any, package: str, names: set[str], spaces: list[Any]) -> Iterator[Any]:
    """Objects that an object in the code leads to; adds its names, and where to look them up."""
    if is_torchs_attention(x):
        names.add(SDPA)
    elif id(x) in _SOFTMAXES or isinstance(x, nn.Softmax):
        names.add("softmax")
    elif isinstance(x, FunctionType):
        yield from (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        yield from (y.cell_contents for y in x.__closure__ or () if y != CellType())
        if _is_own(x.__module__, package):
            used = {name for code in _codes(x.__code__) for name in code.co_names}
            names |= used
            names |= {"@" for code in _codes(x.__code__) if _multiplies(code)}
            yield from (x.__globals__[name] for name in used & x.__globals__.keys())
    elif isinstance(x, _WRAPPERS):
        yield from (getattr(x, name) for name in _WRAPPED if hasattr(x, name))
    elif isinstance(x, (dict, list, tuple)):
        yield from () if len(x) > _MANY else x.values() if isinstance(x, dict) else x
    elif isinstance(x, ModuleType):
        spaces += [vars(x)] if _is_own(x.__name__, package) else []
    elif isinstance(x, type):
        unseen = "forward" if issubclass(x, nn.Module) else None
        spaces += [{n: y for n, y in z.items() if n != unseen} for z in _bodies(x, package)]
    else:
        yield type(x)
        if isinstance(x, nn.Module):
            yield from x.children() if type(x).__module__.startswith("torch.nn.") else ()
        elif _is_own(type(x).__module__, package):
            names.add("__call__")
            spaces.append(getattr(x, "__dict__", {}))


def _bodies(kind: type, package: str) -> list[Any]:
    return [vars(base) for base in kind.__mro__ if _is_own(base.__module__, package)]


def _package(name: str) -> str:
    return str(name).partition(".")[0]


@cache
def _is_own(name: str, package: str) -> bool:
    """Whether a module is of this package, or a file that is not installed."""
    top = _package(name)
    if top in ("torch", "fastattn") or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return top == package or "-packages" not in str(file)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@cache
def _multiplies(code: CodeType) -> bool:
    """Whether code has the operator @."""
    found = (x.argrepr if x.opname == "BINARY_OP" else x.opname for x in get_instructions(code))
    return not {"@", "@=", "BINARY_MATRIX_MULTIPLY"}.isdisjoint(found)  # the last in Python 3.10


def softmax_parts(module: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """Parts with a softmax and no product of their own, where a module has products.

    names: those in the module's code.
    """
    if PRODUCTS.isdisjoint(names):
        return []
    parts = [x for x in module.children() if not type(x).__module__.startswith("torch.nn.")]
    of_parts = [(x, names_in(x)) for x in parts]
    return [x for x, y in of_parts if not SOFTMAX.isdisjoint(y) and PRODUCTS.isdisjoint(y)]


def untraced(stack: Iterable[FrameSummary]) -> str | None:
    """Place of the innermost with statement of a stack, if attention follows in its function.

    From a context manager that torch.compile cannot trace on, a function is in no graph.
    """
    for frame in reversed([*stack]):
        lines, at = linecache.getlines(frame.filename), (frame.lineno or 1) - 1
        if at >= len(lines) or not lines[at].lstrip().startswith("with "):
            continue
        follows = any(name in x for x in _rest(lines, at) for name in (SDPA, "softmax"))
        return f"{frame.filename}:{frame.lineno} ({lines[at].strip()})" if follows else None
    return None


def _rest(lines: list[str], at: int) -> Iterator[str]:
    """Lines of a function from this one on."""
    heads = (x for x in reversed(lines[:at]) if x.lstrip().startswith(("def ", "async def ")))
    width = next((n for n in map(_indent, heads) if n < _indent(lines[at])), -1)
    return takewhile(lambda x: not x[: width + 1].strip(), lines[at:])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
