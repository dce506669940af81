"""Convert options to arguments of torch operators, and define operators with options.

An op takes tensors, numbers and strings: every field of Options is an argument, mod_tensors have a
fixed number of arguments, and a user's function is passed by name.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from .. import block_mask
from ..options import FUNCTIONS, Options
from ..score_checks import MAX_MOD_TENSORS
from .flops import NAMESPACE, Formula, register

_SCHEMA_TYPES = {
    Tensor | None: "Tensor?",
    # A window or an offset may grow with a sequence.
    int | None: "SymInt?",
    float | None: "float?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    Any: "str",
}
_MODS = "mod_tensors"


def _schema() -> dict[str, str]:
    """Types of the arguments by name, in the order of the fields."""
    types: dict[str, str] = {}
    for name, hint in get_type_hints(Options).items():
        if name == _MODS:
            types |= {f"{name}_{i}": "Tensor?" for i in range(MAX_MOD_TENSORS)}
        else:
            types[name] = _SCHEMA_TYPES[hint]
    return types


_SCHEMA = _schema()
# Indices of fields in the arguments.
PLACES = {name: index for index, name in enumerate(_SCHEMA)}
_MOD_PLACES = [PLACES[f"{_MODS}_{i}"] for i in range(MAX_MOD_TENSORS)]


def flat(options: Options) -> tuple[Any, ...]:
    """Flatten options to the arguments of an op."""
    values: list[Any] = []
    for name, x in zip(Options._fields, options, strict=True):
        if name == _MODS:
            values += (*x, *(None,) * (MAX_MOD_TENSORS - len(x)))
        else:
            values.append(block_mask.name_of(x) if name in FUNCTIONS else x)
    return tuple(values)


def unflat(flat: Sequence[object]) -> Options:
    """Inverse of `flat`; functions are looked up by name."""
    fields: dict[str, Any] = {name: flat[PLACES[name]] for name in Options._fields if name != _MODS}
    fields |= {name: block_mask.named(fields[name]) for name in FUNCTIONS}
    mods = [flat[index] for index in _MOD_PLACES]
    return Options(**fields, mod_tensors=tuple(x for x in mods if isinstance(x, Tensor)))


def operator(
    name: str, function: Callable[..., Any], tensors: str, returns: str, flops: Formula
) -> CustomOpDef:
    """Define the custom op fastattn::`name` from a function whose last argument is an Options."""
    names = [argument.split()[-1] for argument in tensors.split(",")]
    count = len(names)

    def call(*arguments: Any) -> Any:
        return function(*arguments[:count], unflat(arguments[count:]))

    arguments = ", ".join(f"{kind} {name}" for name, kind in _SCHEMA.items())
    schema = f"({tensors}, {arguments}) -> {returns}"
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", call, mutates_args=(), schema=schema)
    register(name, (*names, *_SCHEMA), flops)
    return op
