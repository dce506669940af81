"""Form of a call: what decides whether a capture of a module's forward can serve it."""

from typing import Any

import torch
from torch import Tensor, nn

from .adapted import ATTRIBUTES

# Attributes that every module has, and those of `adapted`.
_OWN = frozenset(vars(nn.Module())) - {"training"} | set(ATTRIBUTES)
_PLAIN = (bool, str, type(None), torch.dtype)


def form_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A hashable description of a call and of the module's state, and the numbers in both.

    Numbers and sizes change from call to call, and captures may take them as variables.
    """
    numbers: list[Any] = []
    state = [
        (name, _described(x, numbers))
        for part in module.modules()
        for held in (vars(part), vars(part)["_buffers"])
        for name, x in held.items()
        if name not in _OWN
    ]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled()
    call = _described(tuple(args), numbers), _described(tuple(kwargs.items()), numbers)
    return (modes, call, tuple(state)), tuple(numbers)


def _described(x: Any, numbers: list[Any]) -> Any:
    kind = type(x)
    if isinstance(x, Tensor):
        # torch.compile treats sizes of 0 and 1 by themselves.
        return kind, x.dtype, x.device.type, tuple([n if n < 2 else 2 for n in x.shape])
    if kind in _PLAIN:
        return x
    if kind in (int, float):
        numbers.append(x)
    if kind is tuple:
        return tuple([_described(y, numbers) for y in x])
    # Of others, whether they are empty: a cache in a list grows.
    return (kind, bool(x)) if kind in (list, dict) else kind
