"""Names in the code of a module class, for reports and to choose candidates of capture."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
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
