"""`BlockMask`, and users' functions in options: their translation, and names for operators."""

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .jit_functions.stand_ins import is_jit
from .options import FUNCTIONS
from .tracing import may_keep

_OUTSIDE = (
    "{} must be translated before torch.compile traces the call: pass a BlockMask or "
    "fastattn.mods.from_python of the Python function, made outside, without other functions or "
    "mod_tensors; or a @triton.jit function, with tensors that change as mod_tensors"
)


@dataclass(frozen=True)
class BlockMask:
    """A mask function with its properties and its tables of blocks.

    Kernels skip empty blocks and do not mask full ones. To classify the blocks, a kernel evaluates
    the function at every pair, once for each `BlockMask`, shape and stream, and in each replay of a
    CUDA graph: keep the object and pass it to every layer in every step. A bare function is
    evaluated in each call. The tables are renewed when the call's other masks change, or a tensor
    that the function reads.

    Args:
        mask_mod: @triton.jit function (b, h, q_pos, k_pos, *tensors) -> bool; or a Python function
            (b, h, q_pos, k_pos), as `attention` takes it, whose tensors and numbers are now fixed.
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
    tensors: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = self.mask_mod
        if is_python(own):
            own = TensorFunction.of("mask_mod", own)
        if isinstance(own, TensorFunction):
            object.__setattr__(self, "mask_mod", own.function)
            object.__setattr__(self, "tensors", own.tensors)

    def to(self, device: torch.device) -> "BlockMask":
        """Copy whose tensors are on a device; its tables are made anew."""
        own = None if self.tensors is None else tuple(x.to(device) for x in self.tensors)
        return BlockMask(self.mask_mod, self.per_batch, self.per_head, tensors=own)

    def may_keep(self, device: torch.device) -> bool:
        """Whether tables in `tables` may be used now, and added to."""
        return may_keep(device)


@dataclass(frozen=True)
class TensorFunction:
    """A mask_mod or score_mod, made of a Python function by `mods.from_python`.

    function: @triton.jit. tensors: the mod_tensors that it takes. grad: score_mod_grad, if known.
    """

    function: Any
    tensors: tuple[Tensor, ...] = field(compare=False)
    grad: Any = None

    @classmethod
    def of(cls, option: str, function: Any) -> "TensorFunction":
        """The translation of a Python function.

        Raises:
            ValueError: it cannot be translated.
        """
        from .jit_functions import derivative
        from .jit_functions.python_functions import translated

        if torch.compiler.is_compiling():
            raise ValueError(_OUTSIDE.format(option))
        made = translated({option: (function, ())})
        grad, tensors = None, made["mod_tensors"]
        if option == "score_mod":
            with suppress(derivative.NotDifferentiable):
                grad = derivative.score_mod_grad(made[option], tensors)
        return cls(made[option], tensors, grad)


def is_python(function: Any) -> bool:
    """Whether a function of an option is Python's, which needs a translation."""
    return callable(function) and not is_jit(function)


def with_tensors(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Options with @triton.jit functions alone, all of which take mod_tensors.

    Python functions are translated, as are the functions passed with them. Returns the same dict if
    there is nothing to do.

    Raises:
        ValueError: a function cannot be translated, or now, while torch.compile traces.
    """
    given = options.get("mod_tensors", ())
    if not isinstance(given, tuple) or not all(isinstance(x, Tensor) for x in given):
        return options  # to be refused
    functions = {
        name: parts_of(options[name], given) for name in FUNCTIONS if options.get(name) is not None
    }
    python = [name for name, (function, _) in functions.items() if is_python(function)]
    held = any(isinstance(options[name], TensorFunction) for name in functions)
    own = [_has_own_tensors(options[name], given) for name in functions]
    if not python and not held and not any(own):
        return options
    if given and all(own):
        raise ValueError(
            f"mod_tensors are for @triton.jit functions, got Python's {' and '.join(functions)}, "
            "which read the tensors of their scope"
        )
    made: dict[str, Any]
    if not python and len(functions) == 1 and not given:
        ((name, (function, tensors)),) = functions.items()
        made = {name: function, "mod_tensors": tensors}
        if name == "score_mod" and options[name].grad is not None:
            made["score_mod_grad"] = options[name].grad
    elif torch.compiler.is_compiling():
        raise ValueError(_OUTSIDE.format((python or list(functions))[0]))
    else:
        from .jit_functions.python_functions import translated

        made = translated(functions, device)
    mask = options.get("mask_mod")
    if isinstance(mask, BlockMask):
        made["mask_mod"] = BlockMask(made["mask_mod"], mask.per_batch, mask.per_head, mask.tables)
    return {**options, **made}


def parts_of(x: Any, given: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """The function of an option, and the tensors that it takes: its own, or the given ones."""
    if isinstance(x, TensorFunction):
        return x.function, x.tensors
    if isinstance(x, BlockMask):
        return x.mask_mod, given if x.tensors is None else x.tensors
    return x, () if given and is_python(x) else given


def _has_own_tensors(x: Any, given: tuple[Tensor, ...]) -> bool:
    """Whether the function of an option takes other tensors than the given ones."""
    tensors = getattr(x, "tensors", None)
    if tensors is None:
        return len(given) > 0 and is_python(x)
    return len(tensors) + len(given) > 0


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
