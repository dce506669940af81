"""Launches that are worked out: a call like an earlier one finds its kernel and arguments ready.

A call without tensors but q, k, v and what comes of them is settled by its shapes, strides, dtype
and options: the tile, all the numbers that its kernel gets, and the compiled kernel. To find that
again takes the host less time than Triton takes to look at every argument.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import tiles
from .arguments import dot_precision
from .descriptors import descriptor_like, descriptor_of
from .tiles import TileConfig

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from fastattn.options import Options

_KEPT = 1024
_known: dict[Hashable, Launch] = {}


class Launch:
    """A launch of a kernel with all of its arguments but the tensors, which are its first ones.

    Args:
        kernel: a function of triton.jit.
        programs: of a grid of one dimension; with none, nothing is launched.
        tile: says the warps and the stages.
        arguments: what follows the tensors, in the order of the kernel's parameters.
        streams: of the tensors that kernels load block by block, which of the first arguments each
            is, the tensor, and rows and columns of its blocks. Their descriptors come between the
            tensors and the arguments; None where the tile does without or TMA cannot walk one.
    """

    __slots__ = ("_arguments", "_compiled", "_descriptors", "_grid", "_kernel", "_tile")

    def __init__(
        self, kernel: Any, programs: int, tile: TileConfig, *arguments: Any,
        streams: Sequence[tuple[int, Tensor, int, int]] = (),
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._tile = tile
        self._descriptors = [
            (place, descriptor_like(x, rows, cols) if tile.descriptors else None)
            for place, x, rows, cols in streams
        ]
        if not any(like for _, like in self._descriptors):
            arguments = (*[None] * len(self._descriptors), *arguments)
            self._descriptors = []
        self._arguments = arguments
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on these; any two calls agree in which are None and in all dtypes."""
        if not self._grid[0]:
            return
        # Triton compiles tensors that start at a multiple of 16 bytes apart from others.
        aligned = True
        for x in tensors:
            if x is not None and x.data_ptr() & 15:
                aligned = False
        descriptors = [_described(tensors[place], like) for place, like in self._descriptors]
        if aligned and self._compiled is not None:
            self._compiled[self._grid](*tensors, *descriptors, *self._arguments)
            return
        compiled = self._kernel[self._grid](
            *tensors,
            *descriptors,
            *self._arguments,
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if aligned:
            self._compiled = compiled  # None from the interpreter


def _described(x: Tensor | None, like: TensorDescriptor | None) -> TensorDescriptor | None:
    if like is None:
        return None
    assert x is not None
    return descriptor_of(x, like)


def launch_for(
    plan: Callable[..., Launch], options: Options, tensors: tuple[Tensor | None, ...], *rest: Any
) -> Launch:
    """plan(options, *tensors, *rest), or what it came to for a call that it cannot tell from this.

    Args:
        tensors: q first. Of each, plan may ask for nothing but shape, strides, dtype and device.
        rest: what follows from options and the tensors.
    """
    if not options.plain:
        return plan(options, *tensors, *rest)
    q = tensors[0]
    assert q is not None
    key = (
        plan, options, tiles.device_key(), q.dtype, dot_precision(q.dtype),
        *[None if x is None else (x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    launch = _known.get(key)
    if launch is None:
        launch = plan(options, *tensors, *rest)
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = launch
    return launch


def forget() -> None:
    """Work out every launch anew: for tests and for measuring."""
    _known.clear()
