"""Names that were removed, and what a user does in their place."""

from __future__ import annotations

from typing import NoReturn

# By the name after "fastattn.", or the option of the command.
REMOVED: dict[str, str] = {
    "train --alibi": "--positions alibi",
    "train --data-parallel": "ranks share out the rows of a batch by themselves",
    "train --context-parallel": "fastattn.parallel, as in examples/long_context.py",
    "train --tensor-parallel": "fastattn.models.tensor_parallel.tp_plan with parallelize_module",
    "train --save-in-background": "torch.distributed.checkpoint.async_save in a loop of your own",
}


def raise_missing(module: str, name: str) -> NoReturn:
    """Raise the error of a module's missing name, the end of its `__getattr__`.

    Raises:
        ImportError: the name was removed. `from module import name` hides an AttributeError's text.
        AttributeError: there was never such a name.
    """
    full = f"{module}.{name}"
    if instead := REMOVED.get(full.removeprefix("fastattn.")):
        raise ImportError(f"{full} was removed: {instead}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
