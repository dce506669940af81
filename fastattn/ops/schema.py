"""The options of a call as arguments of torch operators, and operators that take them.

An op takes tensors, numbers and strings: every field of Options is an argument of its own, the
user's tensors have a fixed number of places, and a user's function travels by name.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .. import block_mask
from ..options import MAX_MOD_TENSORS, Options

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
_MOD_PLACE = Options._fields.index("mod_tensors")


def _schema_of(name: str, hint: Any) -> str:
    if name == "mod_tensors":
        return ", ".join(f"Tensor? {name}_{i}" for i in range(MAX_MOD_TENSORS))
    return f"{_SCHEMA_TYPES[hint]} {name}"


_OPTIONS_SCHEMA = ", ".join(_schema_of(*field) for field in get_type_hints(Options).items())
_Flat = tuple[Any, ...]


def flat(options: Options) -> _Flat:
    """options as the arguments of an op, in its order."""
    mods = options.mod_tensors
    return (
        *options[:_MOD_PLACE],
        *mods,
        *(None,) * (MAX_MOD_TENSORS - len(mods)),
        *options[_MOD_PLACE + 1 : -3],
        *(block_mask.name_of(mod) for mod in options[-3:]),
    )


def unflat(flat: _Flat) -> Options:
    """The inverse of `flat`, for functions that can be found by name."""
    mods = flat[_MOD_PLACE : _MOD_PLACE + MAX_MOD_TENSORS]
    fields = (
        *flat[:_MOD_PLACE],
        tuple(x for x in mods if x is not None),
        *flat[_MOD_PLACE + MAX_MOD_TENSORS : -3],
    )
    return Options(*fields, *map(block_mask.named, flat[-3:]))


def operator(name: str, function: Callable[..., Any], tensors: str, returns: str) -> Any:
    """`function`, whose last argument is an Options, as the custom op fastattn::`name`."""
    count = len(tensors.split(","))

    def call(*arguments: Any) -> Any:
        return function(*arguments[:count], unflat(arguments[count:]))

    schema = f"({tensors}, {_OPTIONS_SCHEMA}) -> {returns}"
    return torch.library.custom_op(f"fastattn::{name}", call, mutates_args=(), schema=schema)
