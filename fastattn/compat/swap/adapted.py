"""Modules whose calls go to an adapter first, by a changed class alone.

The adapter gets the module at every call, so that copies, replicas and pickles use their own
current state.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn

from ..calls import Calls

# adapter(module, *args, **kwargs) returns the output of a call, or NotImplemented.
Adapter = Callable[..., Any]
# Attribute of a module: its call counts; of its class: the class that is adapted.
_CALLS, _ADAPTED = "fastattn_calls", "fastattn_adapted"
# Attributes of a module: why its adapter left its last call; why it returned the own forward's
# output for its last call; a table and the key that this call has put into it, where calls are
# refused; captures by form of call; call counts of its parts that may have attention.
REASON, UNSERVED, REFUSED = "fastattn_reason", "fastattn_unserved", "fastattn_refused"
CAPTURES, PARTS = "fastattn_captures", "fastattn_parts"
ATTRIBUTES = (_CALLS, REASON, UNSERVED, REFUSED, CAPTURES, PARTS)


@cache
def _adapted_class(kind: Any, adapter: Adapter) -> Any:
    """Subclass of a module's class, with its name, whose forward calls the adapter first."""

    @wraps(kind.forward)  # some callers read its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls: Calls = getattr(self, _CALLS, None) or Calls()  # none, as another thread undoes it
        output = adapter(self, *args, **kwargs)
        if output is not NotImplemented:
            if (why := getattr(self, UNSERVED, None)) is not None:
                delattr(self, UNSERVED)
            calls.count_served() if why is None else calls.count_passed(why)
            return output
        if torch.compiler.is_compiling():
            calls.trace(type(self))
            return kind.forward(self, *args, **kwargs)
        before = calls.counted
        refused, key = vars(self).pop(REFUSED, ({}, None))
        try:
            output = kind.forward(self, *args, **kwargs)
        except Exception:
            # An invalid call does not disqualify others.
            refused.pop(key, None)
            raise
        # Unless its calls of torch's function were counted.
        if calls.counted == before:
            calls.count_passed(getattr(self, REASON, "the adapter returned NotImplemented"))
        return output

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, 4)
        return (_new, (kind, adapter), *reduced[2:])

    names = ("__module__", "__qualname__", "__doc__")
    body: dict[str, Any] = {name: getattr(kind, name) for name in names}
    body |= {"forward": forward, "__reduce_ex__": reduce, _ADAPTED: kind}
    return type(kind.__name__, (kind,), body)


def _new(kind: type[nn.Module], adapter: Adapter) -> nn.Module:
    made: Any = _adapted_class(cast(Any, kind), adapter)
    return cast(nn.Module, made.__new__(made))


def adapt(module: nn.Module, adapter: Adapter, calls: Calls) -> None:
    """Serve a module's calls by an adapter, and count them."""
    module.__class__ = _adapted_class(cast(Any, type(module)), adapter)
    setattr(module, _CALLS, calls)


def end_adapter(module: nn.Module, calls: Calls | None) -> None:
    """End the adapter of a module that counts in `calls`; None is any."""
    for kind in type(module).__mro__:
        if _ADAPTED in vars(kind) and calls in (None, vars(module).get(_CALLS)):
            module.__class__ = exchanged(type(module), kind, getattr(kind, _ADAPTED))
            for name in ATTRIBUTES:
                module.__dict__.pop(name, None)
            return


def exchanged(kind: Any, old: type, new: type) -> Any:
    """`kind` with `new` as base in place of `old`, as parametrizations and FSDP derive classes."""
    if kind is old:
        return new
    bases = tuple(exchanged(base, old, new) for base in kind.__bases__)
    body = {name: x for name, x in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return kind if bases == kind.__bases__ else type(kind.__name__, bases, body)
