"""Users' functions in options: what they are, and their names where only strings can travel."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from .tracing import may_keep


@dataclass(frozen=True)
class BlockMask:
    """A user's mask function, with what is known about it and the tables of blocks made from it.

    Kernels skip blocks that a mask empties and do not mask those that it fills. Which is which they
    find by asking the function about every pair, once for each `BlockMask` and shape: keep the
    object and pass it again, to every layer and in every step. A bare function is asked anew in
    each call. The tables notice when another mask is combined with this one or a tensor that it
    reads is written.

    Args:
        mask_mod: @triton.jit function (b, h, q_pos, k_pos, *tensors) -> bool.
        per_batch: False promises that its answer does not depend on b.
        per_head: False promises that its answer does not depend on h. Each promise saves the
            kernels as many tables of blocks as there are batch rows, or heads.

    Examples:
        >>> mask = BlockMask(every_third, per_batch=False, per_head=False)  # doctest: +SKIP
        >>> o = attention(q, k, v, mask_mod=mask)  # doctest: +SKIP
    """

    mask_mod: Any
    per_batch: bool = True
    per_head: bool = True
    tables: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def may_keep(self, device: torch.device) -> bool:
        """Whether a table made now may join `tables`."""
        return may_keep(device)


def name_of(mod: Any) -> str:
    """The name of a user's function or `BlockMask`, "" for None: the inverse of `named`.

    Raises:
        ValueError: the function is not at the top level of a module, where it can be found again.
    """
    if mod is None:
        return ""
    if isinstance(mod, BlockMask):
        return f"{name_of(mod.mask_mod)}:{int(mod.per_batch)}{int(mod.per_head)}"
    name = _python_name(mod.fn)
    if "<locals>" in name:
        raise ValueError(
            f"a mask_mod or score_mod that is traced must stand at the top level of a module, "
            f"got {name}"
        )
    return name


def _python_name(function: Any) -> str:
    return f"{function.__module__}:{function.__qualname__}"


# While torch.compile traces it runs this, and takes what comes of it for a constant: of a function
# its release 2.13 knows no __qualname__. By hand, as assume_constant_result imports torch._dynamo.
_python_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(name: str) -> Any:
    """The function or `BlockMask` that `name_of` gave this name."""
    if not name:
        return None
    module, qualname, *promises = name.split(":")
    function: Any = import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    if not promises:
        return function
    per_batch, per_head = (flag == "1" for flag in promises[0])
    return BlockMask(function, per_batch, per_head)
