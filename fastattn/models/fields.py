"""Type checks of configuration fields."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")

_NAMES: Mapping[Any, str] = {
    int: "an integer of 64 bits",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    Mapping: "an object of names and values",
    Sequence: "a list",
    type(None): "null",
}


def from_fields(record: type[_Record], fields: Mapping[str, Any]) -> _Record:
    """Build a dataclass from fields by name, with defaults for missing ones.

    Raises:
        ValueError: a field is unknown or missing, or the dataclass refuses it.
    """
    allowed = {field.name: field for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    if not isinstance(fields, Mapping):
        raise ValueError(f"{record.__name__} must be {_NAMES[Mapping]}, got {fields!r}")
    if unknown := sorted(set(fields) - set(allowed)):
        raise ValueError(f"{record.__name__} has no field {unknown[0]!r}, only {sorted(allowed)}")
    for name, field in allowed.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise ValueError(f"{record.__name__} needs the field {name!r}")
    return record(**fields)


def check_fields(record: Any) -> None:
    """Check the types of a dataclass's fields; numpy's numbers become Python's.

    Raises:
        ValueError: a field is of a wrong type.
    """
    from ..checks import as_python  # with torch

    types_of = get_type_hints(type(record))
    for field in dataclasses.fields(record):
        value = as_python(getattr(record, field.name))
        check_type(field.name, value, types_of[field.name])
        object.__setattr__(record, field.name, value)


def check_type(name: str, value: object, kind: Any) -> None:
    """Raise ValueError unless a value is of a type; an int is a valid float.

    kind: bool, int, float, str, Mapping, Sequence, a sequence of these, a union, or a Literal of
    texts.
    """
    if not _fits(value, kind):
        shown, (*most, last) = repr(value), _names(kind)
        raise ValueError(
            f"{name} must be {' or '.join(filter(None, (', '.join(most), last)))}, "
            f"got {shown if len(shown) <= 80 else shown[:77] + '...'}"
        )


def _fits(value: object, kind: Any) -> bool:
    kind, items = _plain(kind)
    if kind is Union:
        return any(_fits(value, one) for one in items)
    if kind is Literal:
        return value in items
    if kind is Sequence:
        listed = isinstance(value, (list, tuple))
        return listed and all(_fits(x, items[0]) for x in value if items)  # type: ignore[attr-defined]
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and -(2**63) <= value < 2**63
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def _plain(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type of `_NAMES`, Union or Literal, and its type arguments."""
    origin, items = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        origin = Union
    if isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        origin = Mapping if issubclass(origin, Mapping) else Sequence
    return (kind, ()) if origin is None else (origin, items)


def _names(kind: Any) -> list[str]:
    kind, items = _plain(kind)
    if kind is Literal:
        return list(map(repr, items))
    return [name for one in items for name in _names(one)] if kind is Union else [_NAMES[kind]]
