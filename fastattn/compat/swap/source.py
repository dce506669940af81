"""Names in the code of a module class, for reports and to choose candidates of capture."""

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..patch import is_torchs_attention

SDPA = "scaled_dot_product_attention"
SOFTMAX = frozenset({"softmax", "Softmax", "_softmax", "softmax_one"})


def names_in(kind: type[nn.Module]) -> frozenset[str]:
    """Names in a class's functions and in functions of its package that they call; not torch's."""
    of: Any = kind
    return _names_in(of)


@cache
def _names_in(kind: Any) -> frozenset[str]:
    package = kind.__module__.partition(".")[0]
    waiting: list[Any] = [
        member
        for base in kind.__mro__
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
