"""Hooks of a module that serve calls of torch's function within it.

The module and its forward are unchanged. Copies, replicas and pickles keep the hooks, which do not
refer to the module.
"""

import weakref
from typing import Any

import torch
from torch import nn

from .. import patch
from ..calls import Calls, running


class Serving:
    """Patch of torch's function that lasts as long as hooks hold it; a copy of it is another."""

    def __init__(self) -> None:
        token = object()
        patch.serve_running(token)
        self.end = weakref.finalize(self, patch.stop_serving, token)

    def __reduce__(self) -> Any:
        return Serving, ()


class _Hook:
    """A forward hook that counts for a module; torch.jit.script gets an error that explains."""

    def __init__(self, calls: Calls, serving: Serving) -> None:
        self.calls, self.serving = calls, serving

    @property
    def __name__(self) -> str:
        # Only torch.jit reads the names of a module's hooks.
        raise RuntimeError(
            "torch.jit.script compiles hooks of modules and cannot compile those of fastattn.swap: "
            "end the swap by its undo() first, or use torch.compile"
        )


class _Begin(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        running.begin(self.calls)
        self.calls.begin()


class _End(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        running.end(self.calls)
        self.calls.end(torch.compiler.is_compiling())


def is_of_swap(hook: object) -> bool:
    return isinstance(hook, _Hook)


def watch(module: nn.Module, calls: Calls, serving: Serving) -> None:
    """Serve and count calls of torch's function while a module runs."""
    module.register_forward_pre_hook(_Begin(calls, serving), prepend=True)
    # Also where the forward raises.
    module.register_forward_hook(_End(calls, serving), always_call=True)


def unwatch(module: nn.Module, calls: Calls | None) -> None:
    """Remove hooks of `watch` that count in `calls`; None is any."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(hook, _Hook) and calls in (None, hook.calls):
                hook.calls.ended = True  # a forward that runs has no hook now to end it
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
