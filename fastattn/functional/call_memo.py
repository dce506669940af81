"""Calls of `attention` that were checked and worked out before, found again by what was looked at.

Most calls of a program are like an earlier one but for the contents of q, k and v, and without
other tensors. Everything that the host does for such a call up to the launch depends on what is in
the key here: it is done once. The key has the types of numbers, because True is not 1 to a check.
"""

import os
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, tracing
from ..ops import attention
from ..ops.gradients import Kernels
from ..options import Options
from ..torch_backend import formula

_KEPT = 1024
_TYPES = (Tensor, torch.nn.Parameter)


class KnownCall(NamedTuple):
    """Its checked options, its kernels, and `ops.place` as it was."""

    options: Options
    kernels: Kernels
    place: Hashable


_known: dict[Hashable, KnownCall] = {}


def key_of(
    q: Any, k: Any, v: Any, values: tuple[Any, ...], others: tuple[Any, ...]
) -> Hashable | None:
    """What a call is found by; None where it may not be: it is traced, cast, or no such call.

    Args:
        values: arguments of `attention` that the checks see the values of; window first.
        others: the rest, which all calls that are kept have as None.
    """
    if torch.compiler.is_compiling() or type(k) not in _TYPES or type(v) not in _TYPES:
        return None
    if tracing.may_be_traced(q) or formula.autocasting(q.device):
        return None
    window = values[0]
    if type(window) is tuple:
        values = (*values, *map(type, window))
    try:
        layout = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    except RuntimeError:  # nested or sparse, and about to be refused
        return None
    return (
        layout, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        values, *map(type, values), *map(type, others), os.environ.get(dispatch.ENVIRONMENT),
    )  # fmt: skip


def find(key: Hashable | None, q: Tensor) -> KnownCall | None:
    """The known call of this key, if it still holds."""
    try:
        known = _known.get(key)
    except TypeError:  # an argument that has no hash, and is about to be refused
        return None
    return known if known is not None and known.place == attention.place(q.dtype) else None


def keep(key: Hashable | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Remember a call that the Triton kernels serve, with q, k and v as the caller gave them."""
    if key is None or not options.plain or not _lasting(key):
        return
    kernels = attention.prepare(q, k, v, options)
    if kernels is not None:
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = KnownCall(options, kernels, attention.place(q.dtype))


def _lasting(key: Hashable) -> bool:
    """Whether no number in it is held by a tensor or an array, which may hold another next time."""
    assert isinstance(key, tuple)
    return not any(isinstance(x, type) and hasattr(x, "__setitem__") for x in key)


def forget() -> None:
    """Check and work out every call anew: for tests and for measuring."""
    _known.clear()
