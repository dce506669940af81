"""torch's scaled_dot_product_attention, and its replacement in torch's module and in others.

Others hold it by `from torch.nn.functional import scaled_dot_product_attention`, under any name.

Overrides (a TorchFunctionMode, a tensor subclass) compare torch's function by identity, looked up
at import or at each call. So while an override handles a call, torch's module holds torch's own
function.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit import _builtins
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext

_NAME = "scaled_dot_product_attention"
# torch's own function, for calls that the kernels do not support.
torch_attention: Callable[..., Tensor] = F.scaled_dot_product_attention

_lock = threading.RLock()
_ours: Callable[..., Tensor] | None = None
_wanted = False
# Number of overrides that are handling a call, in all threads.
_overriding = 0
_before: Any = torch_attention
# Namespaces of other modules with the names by which they hold torch's function.
_holders: list[tuple[dict[str, Any], list[str]]] = []


def put(function: Callable[..., Tensor]) -> None:
    """Replace torch's function, for all threads; always by the same one."""
    global _ours, _wanted, _holders
    with _lock:
        _ours, _wanted = function, True
        _holders = list(_found())
        # torch.jit.script takes it for torch's own.
        _builtins._register_builtin(function, f"aten::{_NAME}")
        _apply()


def take_away() -> None:
    """Undo `put`, unless another library has replaced our function since."""
    global _wanted
    with _lock:
        _wanted = False
        _apply()


def is_torchs_attention(function: object) -> bool:
    """Whether it is torch's function or its replacement."""
    return function is torch_attention or (function is not None and function is _ours)


def _found() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Modules that hold torch's function, or ours from before, and its names there."""
    wanted = {id(torch_attention), id(_ours)}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ("torch", "fastattn") or not isinstance(module, ModuleType):
            continue
        space = vars(module)
        # No loop of Python's, as there are thousands of modules; copied, as others may import.
        if not wanted.isdisjoint(map(id, [*space.values()])):
            yield space, [x for x, value in [*space.items()] if id(value) in wanted]


def _apply() -> None:
    global _before
    ours = _wanted and not _overriding
    before, after = (torch_attention, _ours) if ours else (_ours, torch_attention)
    for space, names in _holders:
        for name in names:
            if space.get(name) is before:
                space[name] = after
    current = getattr(F, _NAME)
    if ours and current is not _ours:
        _before = current
        setattr(F, _NAME, _ours)
    elif current is _ours and not ours:
        setattr(F, _NAME, _before)
        _before = torch_attention


@contextmanager
def _torchs_name() -> Iterator[None]:
    global _overriding
    with _lock:
        _overriding += 1
        _apply()
    try:
        yield
    finally:
        with _lock:
            _overriding -= 1
            _apply()


def overridden(*tensors: Any) -> str | None:
    """Name the mode or subclass that overrides torch's function for these arguments, or None.

    A default device, a TorchFunctionMode that passes every call on, does not count.
    """
    # Under torch.compile's tracing, has_torch_function ignores modes.
    if not torch.compiler.is_compiling() and not has_torch_function(tensors):
        return None
    if torch._C._is_torch_function_mode_enabled():
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not all(isinstance(mode, DeviceContext) for mode in modes):
            return "a TorchFunctionMode"
    return next((type(x).__name__ for x in tensors if _overrides(x)), None)


def _overrides(x: Any) -> bool:
    if not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter):
        return False
    return type(x).__torch_function__ is not torch._C._disabled_torch_function_impl


def by_overrides(*args: Any, **kwargs: Any) -> Tensor:
    """torch's function with its overrides; a graph break for torch.compile."""
    with _torchs_name():
        if "torch._dynamo" not in sys.modules:
            return torch_attention(*args, **kwargs)
        disabled = torch.compiler.disable(torch_attention)  # type: ignore[no-untyped-call]
        result: Tensor = disabled(*args, **kwargs)
        return result


# The mark of torch.compiler.disable, without importing torch._dynamo, which takes a second.
by_overrides._torchdynamo_disable = True  # type: ignore[attr-defined]
