"""Cached launches: the compiled kernel and its arguments for a call signature.

A signature holds shapes, strides and dtypes of tensors, whether those of the options start at a
multiple of 16 bytes, and the options' numbers: all that a launcher goes by. To find the arguments
again takes the host less time than to make them, and than Triton takes to look at each of them.
Tensors are the call's own: none is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from . import tiles
from .descriptors import descriptor_like, descriptor_of
from .tiles import TileConfig

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from fastattn.options import Options

# Which tensor a descriptor is of, and one for tensors that lie in memory as it does.
Described: TypeAlias = "tuple[int, TensorDescriptor | None]"

_KEPT = 1024


@lru_cache(_KEPT)
def _slot(key: Hashable) -> list[Any]:
    """Where the launch of this key is, if there is one; the slots used last are kept."""
    return []


class Reusable(Protocol):
    """`Launch`, or several of one call."""

    @property
    def reusable(self) -> bool:
        """Whether the launch may be cached, as for `Launch`."""

    def bind(self, given: Sequence[Any]) -> None:
        """Bind the launch, as `Launch.bind`."""


_L = TypeVar("_L", bound=Reusable)


class Tables(Protocol):
    """Tensors that are made anew for each call; see `block_sparsity.CallTables`."""

    empty: tuple[Tensor | None, ...]

    def bind(self, given: Sequence[Any]) -> None:
        """Bind every launch, as `Launch.bind`."""

    def __call__(self, options: Sequence[Any]) -> list[Tensor | None]:
        """Make and fill the tables of a call with these options."""


class Stream(NamedTuple):
    """A tensor of four dims that a kernel loads in blocks of one head.

    place: n if it is the n-th of the tensors that a launch is called on, ~n if it is the n-th in
    `given`.
    """

    place: int
    x: Tensor | None
    rows: int
    cols: int


class Launch:
    """A launch of a kernel with all of its arguments but its first ones, which are tensors.

    reusable: whether calls may bring tensors of their own in place of those in the arguments.

    Args:
        kernel: a function of triton.jit.
        programs: of a grid of one dimension, or of two; with none, nothing is launched.
        tile: says the warps and the stages, or what is said to Triton in their place.
        arguments: what follows the tensors, in the order of the kernel's parameters.
        streams: what kernels load block by block, see `Stream`. Their descriptors come between the
            tensors and the arguments; None where the tile does without or TMA cannot walk one.
        tables: further tensors among the arguments, which are made anew for each call.
        described: which of the first arguments the kernel takes a descriptor of, and one like it,
            in place of `streams`.
        hidden: so many of the first arguments the kernel knows by descriptors alone.
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
        self, kernel: Any, programs: int | tuple[int, int], tile: TileConfig | dict[str, Any],
        *arguments: Any, streams: Sequence[Stream] = (),
        tables: Tables | None = None, described: Sequence[Described] = (), hidden: int = 0,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        by_descriptors = False
        self._tile = tile
        if isinstance(tile, TileConfig):
            by_descriptors = tile.descriptors
            tile = tile.compiler_options
        self._meta = tile
        self._descriptors = [
            (place, descriptor_like(x, rows, cols) if by_descriptors and x is not None else None)
            for place, x, rows, cols in streams
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

    def bind(self, given: Sequence[Any]) -> None:
        """Let every call bring its own in place of the tensors in `given`.

        The launch is not reusable where its arguments hold another, made for a single call.
        """
        self.reusable = True
        if self._tables is not None:
            given = (*given, *self._tables.empty)
            self._tables.bind(given)
        elif not any(map(_of_a_call, given)):
            return  # nothing in the arguments can come of a tensor
        places = {id(x): place for place, x in enumerate(given) if _of_a_call(x)}
        arguments = list(self._arguments)
        for at, argument in enumerate(arguments):
            record = type(argument) if isinstance(argument, tuple) else None
            fields = [argument] if record is None else list(argument)
            held = [(n, id(x)) for n, x in enumerate(fields) if _of_a_call(x)]
            tensors = [(n, places[x]) for n, x in held if x in places]
            self.reusable = self.reusable and len(tensors) == len(held)
            for n, _ in tensors:
                fields[n] = None
            if tensors:
                arguments[at] = None
                self._bound.append(_Bound(at, record, fields, tensors))
        self._arguments = tuple(arguments)

    def __call__(self, given: Sequence[Any], *tensors: Tensor | None) -> None:
        """Launch on these; any two calls agree in which are None and in all dtypes.

        given: as the one of `bind`, in tensors of the same signature.
        """
        if not self._grid[0]:
            return
        # Triton compiles tensors that start at a multiple of 16 bytes apart from others.
        pointers = 0
        for x in tensors:
            if x is not None:
                pointers |= x.data_ptr()
        if self._tables is not None:
            given = (*given, *self._tables(given))
        arguments = self._arguments if not self._bound else self._with(given)
        descriptors = [
            _described(tensors[place] if place >= 0 else given[~place], like)
            for place, like in self._descriptors
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

    def _with(self, given: Sequence[Any]) -> list[Any]:
        """The arguments with the tensors of a call."""
        arguments = list(self._arguments)
        for at, record, fields, places in self._bound:
            if record is None:
                arguments[at] = given[places[0][1]]
                continue
            values = fields.copy()
            for n, place in places:
                values[n] = given[place]
            # As a NamedTuple's own `_make`, in half of its time.
            arguments[at] = tuple.__new__(record, values)
        return arguments


class _Bound(NamedTuple):
    """An argument that holds tensors: its number, its fields, and whence each tensor comes.

    record: its type where it is a tuple. places: (field, place in what is given).
    """

    at: int
    record: type[tuple[Any, ...]] | None
    fields: list[Any]
    places: list[tuple[int, int]]


def _of_a_call(x: Any) -> bool:
    """Whether it is a tensor, or a tuple of them."""
    return isinstance(x, Tensor) or (type(x) is tuple and any(isinstance(y, Tensor) for y in x))


def _described(x: Tensor | None, like: TensorDescriptor | None) -> TensorDescriptor | None:
    if like is None:
        return None
    assert x is not None
    return descriptor_of(x, like)


def launch_for(
    plan: Callable[..., _L], options: Options, tensors: tuple[Tensor | None, ...], *rest: Any
) -> _L:
    """plan(options, *tensors, *rest), cached where launches with such options can be.

    Args:
        tensors: q first. Of each, plan may ask for nothing but shape, strides, dtype and device.
        rest: what follows from options and the tensors.
    """
    if options.launched_anew:
        return plan(options, *tensors, *rest)
    q = tensors[0]
    assert q is not None
    key = (
        plan, options if options.plain else signature(options), q.dtype,
        *[None if x is None else (x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    return cached(
        key, options, lambda given: plan(type(options)._make(given), *tensors, *rest), q.dtype
    )


def cached(
    key: Hashable | None, given: Sequence[Any], plan: Callable[[list[Any]], _L],
    dtype: torch.dtype,
) -> _L:  # fmt: skip
    """plan(given), found again by its key and `device_key`.

    key: says all that plan asks of the tensors and numbers in `given`; None: nothing may be kept.
    """
    if key is not None:
        key = (key, tiles.device_key(dtype))
        slot: list[_L] = _slot(key)
        if slot:
            return slot[0]
    # One object for each place, even where a call has one tensor in two of them.
    views = [_viewed(x) for x in given] if any(map(_of_a_call, given)) else list(given)
    launch = plan(views)
    launch.bind(views)
    if key is not None and launch.reusable:
        slot[:] = [launch]
    return launch


def _viewed(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach()
    return tuple(map(_viewed, x)) if _of_a_call(x) else x


def signature(given: Sequence[Any]) -> tuple[Any, ...]:
    """Properties of tensors and numbers that launchers may depend on, without the tensors."""
    return tuple(
        (x.dtype, x.shape, x.stride(), x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else x
        for x in given
    )


def forget() -> None:
    """Make every launch anew: for tests and for measuring."""
    _slot.cache_clear()
