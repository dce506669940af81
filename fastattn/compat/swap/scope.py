"""Hooks of a module, and nothing else, by which calls of torch's function within it are served.

The module stays as it is, its forward too. Copies, replicas and pickles of it have its hooks, which
know nothing of the module.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..calls import Calls, running


class _Hook:
    """A forward hook that counts for a module; torch.jit.script is told why it cannot have it."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    @property
    def __name__(self) -> str:
        # torch.jit asks the hooks of a module for their names, and nobody else does.
        raise RuntimeError(
            "torch.jit.script compiles hooks of modules and cannot compile those of fastattn.swap: "
            "end the swap by its undo() first, or use torch.compile"
        )


class _Begin(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        running.begin(self.calls)


class _End(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        running.end(self.calls)


def is_of_swap(hook: object) -> bool:
    return isinstance(hook, _Hook)


def watch(module: nn.Module, calls: Calls) -> Callable[[], None]:
    """Have calls of torch's function served and counted while a module runs.

    Returns:
        What removes the hooks.
    """
    begin = module.register_forward_pre_hook(_Begin(calls), prepend=True)
    # Also where the forward raises.
    end = module.register_forward_hook(_End(calls), always_call=True)

    def remove() -> None:
        begin.remove()
        end.remove()

    return remove
