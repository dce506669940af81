"""Table of layers' options: type, default, check, and exclusions.

`SharedOptions` lists the options of all layers, `SelfOptions` those of self-attention. The
constructors of layers, their signatures and the layers of models follow from the tables.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_args, get_type_hints

import torch

from .. import checks
from ..options import Window
from ..rotary import RotaryStyle
from .relative import RelativeScheme

Scoring = Literal["scaled_dot", "dot", "multiplicative", "additive"]
OutputGate = Literal["head", "element"]
_Init = TypeVar("_Init", bound=Callable[..., None])


class ModuleOption(NamedTuple):
    """An option of a layer.

    default: value if it is not passed.
    check: (name, value) -> value; not called for None.
    passed_as: "mask" or "score": passed to `attention` under the same name.
    excluded_by: "additive" scoring, or relative terms on the "values".
    """

    default: Any = None
    check: Callable[[str, Any], Any] | None = None
    passed_as: Literal["mask", "score"] | None = None
    excluded_by: tuple[str, ...] = ()


_SCORES = ("additive", "values")


def check_output_gate(name: str, value: Any) -> Any:
    """Check for an `OutputGate`."""
    if value not in get_args(OutputGate):
        raise ValueError(f"{name} must be 'head', 'element' or None, got {value!r}")
    return value


class SharedOptions(TypedDict, total=False):
    """Options of self- and cross-attention; `fastattn.GQAttention` explains them."""

    head_dim: Annotated[int | None, ModuleOption()]
    v_head_dim: Annotated[int | None, ModuleOption(None, partial(checks.check_count, least=1))]
    qkv_bias: Annotated[bool, ModuleOption(False, checks.check_flag)]
    out_bias: Annotated[bool, ModuleOption(False, checks.check_flag)]
    qk_norm: Annotated[bool, ModuleOption(False, checks.check_flag)]
    output_gate: Annotated[OutputGate | None, ModuleOption(None, check_output_gate)]
    scoring: Annotated[Scoring, ModuleOption("scaled_dot")]
    softcap: Annotated[float | None, ModuleOption(None, checks.check_positive, "score", _SCORES)]
    sinks: Annotated[bool, ModuleOption(False, checks.check_flag, excluded_by=_SCORES)]
    batch_invariant: Annotated[bool, ModuleOption(False, checks.check_flag, "score", _SCORES)]
    dropout: Annotated[float, ModuleOption(0.0)]
    attention_dropout: Annotated[float, ModuleOption(0.0, excluded_by=_SCORES)]
    scale: Annotated[float | None, ModuleOption()]
    backend: Annotated[str | None, ModuleOption()]
    device: Annotated[torch.device | str | None, ModuleOption()]
    dtype: Annotated[torch.dtype | None, ModuleOption()]


class SelfOptions(SharedOptions, total=False):
    """Options of self-attention except `causal`."""

    window: Annotated[Window, ModuleOption(excluded_by=("values",))]
    stride: Annotated[
        int | None, ModuleOption(None, partial(checks.check_count, least=1), "mask", ("values",))
    ]
    keep_first: Annotated[int, ModuleOption(0, passed_as="mask")]
    rotary: Annotated[RotaryStyle | None, ModuleOption()]
    rotary_base: Annotated[float, ModuleOption(10000.0)]
    rotary_dim: Annotated[int | None, ModuleOption()]
    alibi: Annotated[bool, ModuleOption(False, checks.check_flag, excluded_by=_SCORES)]
    relative_bias: Annotated[int | None, ModuleOption(excluded_by=("additive",))]
    relative_max_distance: Annotated[int | None, ModuleOption()]
    relative: Annotated[RelativeScheme | None, ModuleOption(excluded_by=("additive",))]


@cache
def table(kind: type) -> Mapping[str, ModuleOption]:
    """The entries of a class of options, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def passed_as(kind: type, part: str) -> tuple[str, ...]:
    """Names of the "mask" or "score" options that go to `attention` unchanged."""
    return tuple(name for name, row in table(kind).items() if row.passed_as == part)


def complete(kind: type, options: Mapping[str, Any], taker: str) -> dict[str, Any]:
    """Checked values of all options of a class, with defaults for missing ones.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of its range.
    """
    rows = table(kind)
    for name in options:
        if name not in rows:
            raise checks.unexpected(taker, name, rows)
    values = {}
    for name, row in rows.items():
        value = checks.as_python(options.get(name, row.default))
        values[name] = value if value is None or row.check is None else row.check(name, value)
    return values


def excluded(by: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the options that are in use although `by` excludes them."""
    for name, row in table(SelfOptions).items():
        value = values.get(name)
        if by in row.excluded_by and value is not None and value is not False and value != 0:
            yield name, value


def shows_options(kind: type) -> Callable[[_Init], _Init]:
    """Show the keyword options in the signature of an `__init__`."""

    def mark(init: _Init) -> _Init:
        signature = inspect.signature(init)
        *own, _ = signature.parameters.values()
        hints = get_type_hints(kind)
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=hints[name]
            )
            for name, row in table(kind).items()
        ]
        init.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return init

    return mark
