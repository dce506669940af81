"""Modules whose forward is an adapter's first: by a class of their own, and no other change.

The adapter gets the module at every call, so that copies, replicas and pickles have their own parts
served, with what they hold at that moment.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from ..calls import Calls

# A call of a module: adapter(module, *args, **kwargs) gives the output, or NotImplemented.
Adapter = Callable[..., Any]
_CALLS = "fastattn_calls"
# Attributes of a module: why its adapter left its last call, and whether it leaves all; why it gave
# the output of its last call as the module's own forward computes it.
REASON, REFUSED, UNSERVED = "fastattn_reason", "fastattn_refused", "fastattn_unserved"


@cache
def _adapted_class(kind: Any, adapter: Adapter) -> Any:
    """A subclass of a module's class, under its name, whose forward asks the adapter first."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls: Calls = getattr(self, _CALLS)
        output = adapter(self, *args, **kwargs)
        if output is not NotImplemented:
            why = vars(self).pop(UNSERVED, None)
            calls.count_served() if why is None else calls.count_passed(why)
            return output
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        before = calls.counted
        try:
            output = kind.forward(self, *args, **kwargs)
        except Exception:
            # A call that is wrong by itself says nothing of others.
            vars(self).pop(REFUSED, None)
            raise
        # Unless calls of torch's function in it were counted.
        if calls.counted == before:
            calls.count_passed(getattr(self, REASON, "the adapter leaves the call"))
        return output

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, 4)
        return (_new, (kind, adapter), *reduced[2:])

    names = ("__module__", "__qualname__", "__doc__")
    body: dict[str, Any] = {name: getattr(kind, name) for name in names}
    return type(kind.__name__, (kind,), body | {"forward": forward, "__reduce_ex__": reduce})


def _new(kind: type[nn.Module], adapter: Adapter) -> nn.Module:
    made: Any = _adapted_class(cast(Any, kind), adapter)
    return cast(nn.Module, made.__new__(made))


def adapt(module: nn.Module, adapter: Adapter, calls: Calls) -> Callable[[], None]:
    """Have a module's calls served by an adapter, and counted.

    Returns:
        What makes the module what it was.
    """
    kind: Any = type(module)
    module.__class__ = _adapted_class(kind, adapter)
    setattr(module, _CALLS, calls)

    def undo() -> None:
        module.__class__ = kind
        for name in (_CALLS, REASON, REFUSED, UNSERVED):
            module.__dict__.pop(name, None)

    return undo
