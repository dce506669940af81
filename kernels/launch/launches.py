"""Cached launches: the compiled kernel and its arguments for a call signature.

A signature holds shapes, strides and dtypes of tensors, 16-byte alignment of the options' tensors,
and the options' numbers: all that a launcher depends on. A lookup is faster than computing the
arguments, and than Triton's own inspection of them. No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

import torch
from torch import Tensor

from . import tiles
from .descriptors import descriptor_like, descriptor_of
from .tiles import TileConfig

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ...options import Options

# Index of a descriptor's tensor, and a descriptor of a tensor with the same layout.
Described: TypeAlias = "tuple[int, TensorDescriptor | None]"

_KEPT = 1024


@lru_cache(_KEPT)
def _slot(key: Hashable) -> list[Any]:
    """LRU slot of this key's launch, if any."""
    return []


class Reusable(Protocol):
    """`Launch`, or several of a call."""

    @property
    def reusable(self) -> bool:
        """Whether the launch may be cached, as for `Launch`."""

    def bind(self, inputs: Sequence[object]) -> None:
        """Bind the launch, as `Launch.bind`."""


_L = TypeVar("_L", bound=Reusable)
_P = ParamSpec("_P")


class Tables(Protocol):
    """Tensors made for each call; see `block_sparsity.CallTables`."""

    empty: tuple[Tensor | None, ...]

    def bind(self, inputs: Sequence[object]) -> None:
        """Bind every launch, as `Launch.bind`."""

    def __call__(self, options: Sequence[Any]) -> list[Tensor | None]:
        """Make and fill the tables of a call with these options."""


class Stream(NamedTuple):
    """A 4-dim tensor that a kernel loads in blocks of one head.

    source: n for the n-th tensor of the launch call, ~n for the n-th in `inputs`.
    """

    source: int
    x: Tensor | None
    rows: int
    cols: int


class Launch:
    """A launch of a kernel with all arguments except its first ones, which are tensors.

    reusable: whether other calls may replace the tensors in the arguments.

    Args:
        kernel: a @triton.jit function.
        programs: 0 launches nothing. One dim, as the others of a grid end at 65535.
        tile: warps and stages, or options for Triton instead.
        arguments: arguments after the tensors, in the kernel's order.
        streams: tensors loaded block by block, see `Stream`. Their descriptors come between the
            tensors and the arguments; None if the tile has none or TMA does not support the tensor.
        tables: further tensors among the arguments, made for each call.
        described: first arguments passed as descriptors, each with one like it, in place of
            `streams`.
        hidden: number of first arguments that are passed only as descriptors.
    """

    __slots__ = (
        "_arguments",
        "_bound",
        "_descriptors",
        "_grid",
        "_hidden",
        "_kernel",
        "_meta",
        "_run_compiled",
        "_tables",
        "_tile",
        "reusable",
    )

    def __init__(
        self, kernel: JITFunction, programs: int, tile: TileConfig | dict[str, int],
        *arguments: object, streams: Sequence[Stream] = (), tables: Tables | None = None,
        described: Sequence[Described] = (), hidden: int = 0,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        by_descriptors = False
        self._tile = tile
        if isinstance(tile, TileConfig):
            by_descriptors = tile.descriptors
            tile = tile.compiler_options
        self._meta = tile
        self._descriptors = [
            (index, descriptor_like(x, rows, cols) if by_descriptors and x is not None else None)
            for index, x, rows, cols in streams
        ]
        while self._descriptors and self._descriptors[-1][1] is None:
            self._descriptors.pop()
            arguments = (None, *arguments)
        self._descriptors += described
        self._hidden = hidden
        self._arguments = arguments
        self._bound: list[_Bound] = []
        self._tables = tables
        self.reusable = False
        self._run_compiled: Callable[..., None] | None = None

    @property
    def programs(self) -> int:
        """Number of programs."""
        return self._grid[0]

    def bind(self, inputs: Sequence[object]) -> None:
        """Replace the tensors in `inputs` by placeholders that every call fills.

        The launch is not reusable if its arguments hold another tensor, made for a single call.
        """
        self.reusable = True
        if self._tables is not None:
            inputs = (*inputs, *self._tables.empty)
            self._tables.bind(inputs)
        places = {id(inputs[index]): index for index in _of_a_call(inputs)}
        if not places and self._tables is None:
            return  # no argument can derive from a tensor
        arguments = list(self._arguments)
        for at, argument in enumerate(arguments):
            record, fields = None, [argument]
            if isinstance(argument, tuple):
                record, fields = type(argument), list(argument)
            held = [(n, id(fields[n])) for n in _of_a_call(fields)]
            tensors = [(n, places[x]) for n, x in held if x in places]
            self.reusable = self.reusable and len(tensors) == len(held)
            for n, _ in tensors:
                fields[n] = None
            if tensors:
                arguments[at] = None
                self._bound.append(_Bound(at, record, fields, tensors))
        self._arguments = tuple(arguments)

    def __call__(self, inputs: Sequence[object], *tensors: Tensor | None) -> None:
        """Launch on these tensors; all calls agree in which are None and in all dtypes.

        inputs: as in `bind`, with tensors of the same signature.
        """
        if not self._grid[0]:
            return
        # Triton specialises on 16-byte alignment of tensors.
        pointers = 0
        for x in tensors:
            if x is not None:
                pointers |= x.data_ptr()
        if self._tables is not None:
            inputs = (*inputs, *self._tables(inputs))
        arguments = self._arguments if not self._bound else self._with(inputs)
        descriptors = [
            _described(tensors[index] if index >= 0 else inputs[~index], like)
            for index, like in self._descriptors
        ]
        tensors = tensors[self._hidden :]
        if self._run_compiled is not None and not pointers & 15:
            self._run_compiled(*tensors, *descriptors, *arguments)
            return
        try:
            compiled = self._kernel[self._grid](*tensors, *descriptors, *arguments, **self._meta)
        except Exception as error:
            error.tile = self._tile  # type: ignore[attr-defined]
            raise
        if compiled is not None and not pointers & 15:  # the interpreter compiles nothing
            self._run_compiled = compiled[self._grid]

    def _with(self, inputs: Sequence[object]) -> list[object]:
        """The arguments with the tensors of a call."""
        arguments = list(self._arguments)
        for at, record, fields, places in self._bound:
            if record is None:
                arguments[at] = inputs[places[0][1]]
                continue
            values = fields.copy()
            for n, index in places:
                values[n] = inputs[index]
            # NamedTuple's `_make`, in half the time.
            arguments[at] = tuple.__new__(record, values)
        return arguments


class _Bound(NamedTuple):
    """An argument that holds tensors: its index, its fields, and each tensor's source.

    record: its type, if a tuple. places: (field, index in `inputs`).
    """

    at: int
    record: type[tuple[object, ...]] | None
    fields: list[object]
    places: list[tuple[int, int]]


def _of_a_call(values: Sequence[object]) -> list[int]:
    """Indices of tensors, and of tuples that hold one."""
    return [
        index
        for index, x in enumerate(values)
        if isinstance(x, Tensor) or (type(x) is tuple and any(isinstance(y, Tensor) for y in x))
    ]


def _described(x: object, like: TensorDescriptor | None) -> TensorDescriptor | None:
    if like is None:
        return None
    assert isinstance(x, Tensor)
    return descriptor_of(x, like)


def cached_plan(
    count: int,
) -> Callable[[Callable[Concatenate[Options, _P], _L]], Callable[Concatenate[Options, _P], _L]]:
    """Decorator of a function plan(options, *tensors, *rest): caches its launches if the options
    permit it.

    count: of the tensors, q first. plan may read only shape, strides, dtype and device of each. The
        rest are tensors derived from these and options, values, and all others of the launch that
        some calls leave out.
    """

    def decorated(
        plan: Callable[Concatenate[Options, _P], _L],
    ) -> Callable[Concatenate[Options, _P], _L]:
        def launch_for(options: Options, /, *arguments: _P.args, **_: _P.kwargs) -> _L:
            if options.launched_anew:
                return plan(options, *arguments, **_)
            tensors: Any = arguments[:count]
            dtype = tensors[0].dtype
            key = (
                plan, options if options.plain else signature(options),
                *[None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors],
                *[isinstance(x, Tensor) or x for x in arguments[count:]],
            )  # fmt: skip
            return cached(
                key, options, lambda x: plan(type(options)._make(x), *arguments, **_), dtype
            )

        return launch_for

    return decorated


def cached(
    key: Hashable | None, inputs: Sequence[object], plan: Callable[[list[Any]], _L],
    dtype: torch.dtype,
) -> _L:  # fmt: skip
    """plan(inputs), cached by key and `device_key`.

    key: determines all that plan reads of `inputs`; None: not cached.
    """
    if key is not None:
        key = (key, tiles.device_key(dtype))
        slot: list[_L] = _slot(key)
        if slot:
            return slot[0]
    # Distinct objects, even if a call passes one tensor twice.
    views = list(inputs)
    for index in _of_a_call(inputs):
        views[index] = _viewed(inputs[index])
    launch = plan(views)
    launch.bind(views)
    if key is not None and launch.reusable:
        slot[:] = [launch]
    return launch


def _viewed(x: object) -> object:
    if isinstance(x, Tensor):
        return x.detach()
    return tuple(map(_viewed, x)) if type(x) is tuple else x


def signature(inputs: Sequence[object]) -> tuple[Hashable, ...]:
    """Properties of tensors and numbers that launchers may depend on, without the tensors."""
    return tuple(
        (x.dtype, x.shape, x.stride(), x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else x
        for x in inputs
    )


def forget() -> None:
    """Clear the cache, for tests and benchmarks."""
    _slot.cache_clear()
