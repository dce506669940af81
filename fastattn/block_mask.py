"""Users' functions in options, and their names for operators, which take only strings."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from .tracing import may_keep


@dataclass(frozen=True)
class BlockMask:
    """A user's mask function with its properties and its tables of blocks.

    Kernels skip empty blocks and do not mask full ones. To classify the blocks, a kernel evaluates
    the function at every pair, once for each `BlockMask` and shape: keep the object and pass it to
    every layer in every step. A bare function is evaluated in each call. The tables are renewed
    when the call's other masks change, or a tensor that the function reads.

    Args:
        mask_mod: @triton.jit function (b, h, q_pos, k_pos, *tensors) -> bool.
        per_batch: False promises that the mask does not depend on b.
        per_head: False promises that the mask does not depend on h. One table of blocks then serves
            all batch rows, or all heads.

    Examples:
        >>> mask = BlockMask(every_third, per_batch=False, per_head=False)  # doctest: +SKIP
        >>> o = attention(q, k, v, mask_mod=mask)  # doctest: +SKIP
    """

    mask_mod: Any
    per_batch: bool = True
    per_head: bool = True
    tables: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def may_keep(self, device: torch.device) -> bool:
        """Whether a table that is made now may be kept in `tables`."""
        return may_keep(device)


def name_of(mod: Any) -> str:
    """The name of a user's function or `BlockMask`, "" for None: the inverse of `named`.

    Raises:
        ValueError: the function is not at the top level of a module.
    """
    if mod is None:
        return ""
    if isinstance(mod, BlockMask):
        return f"{name_of(mod.mask_mod)}:{int(mod.per_batch)}{int(mod.per_head)}"
    name = _python_name(mod.fn)
    if "<locals>" in name:
        raise ValueError(
            f"a mask_mod or score_mod that is traced must be at the top level of a module, "
            f"got {name}"
        )
    return name


def _python_name(function: Any) -> str:
    return f"{function.__module__}:{function.__qualname__}"


# torch.compile runs this while it traces and takes the result for a constant: torch 2.13 cannot
# trace __qualname__. Marked by hand: assume_constant_result would import torch._dynamo.
_python_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(name: str) -> Any:
    """The function or `BlockMask` with this name of `name_of`."""
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
