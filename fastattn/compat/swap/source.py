"""Names in the code of a module class, for reports and to choose candidates of capture."""

import linecache
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from traceback import FrameSummary
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..torch_sdpa import is_torchs_attention

_PLAIN = {bool, int, float, str, type(None), dict, list, tuple, set, OrderedDict, FunctionType}
SDPA = "scaled_dot_product_attention"
SOFTMAX = frozenset({"softmax", "Softmax", "_softmax", "softmax_one"})


def names_in(module: nn.Module) -> frozenset[str]:
    """Names in the functions of a module's class and of what it holds, and in those they call.

    Of the same package each; torch's have none.
    """
    held = [x for x in vars(module).values() if not isinstance(x, nn.Module)]
    kinds = {type(module), *map(type, held)} - _PLAIN
    functions = [x for x in held if isinstance(x, FunctionType)]
    return frozenset().union(*map(_names_in, [*kinds, *functions]))


@cache
def _names_in(kind: Any) -> frozenset[str]:
    package = str(kind.__module__).partition(".")[0]
    waiting: list[Any] = [kind] + [
        member
        for base in getattr(kind, "__mro__", ())
        if not base.__module__.startswith("torch.") and base is not object
        for member in vars(base).values()
    ]
    names: set[str] = set()
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        for code in _codes(function.__code__):
            seen.add(code)
            names.update(code.co_names)
            named = [function.__globals__.get(name) for name in code.co_names]
            # Under whatever name.
            names.update(SDPA for x in named if is_torchs_attention(x))
            waiting += [
                x for x in named if str(getattr(x, "__module__", "")).partition(".")[0] == package
            ]
    return frozenset(names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


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
