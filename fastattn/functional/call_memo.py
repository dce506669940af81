"""Calls of `attention` that were checked and worked out before, found again by what was looked at.

Most calls of a program are like an earlier one but for the contents of q, k and v, and without
other tensors. Everything that the host does for such a call up to the launch depends on what is in
the key here: it is done once. The key has the types of numbers, because True is not 1 to a check.
"""

import os
from collections.abc import Hashable
from functools import cache
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


def key_of(q: Any, k: Any, v: Any, options: dict[str, Any], backend: str | None) -> Hashable | None:
    """What a call is found by; None where it may not be: it is traced, cast, or no such call.

    options: all that the caller gave. A call with an option that is no number is not kept.
    """
    if torch.compiler.is_compiling() or type(k) not in _TYPES or type(v) not in _TYPES:
        return None
    if tracing.may_be_traced(q) or formula.autocasting(q.device):
        return None
    values = tuple(options.values())
    kinds = tuple(map(type, values))
    if tuple in kinds:  # the sides of a window
        kinds = (*kinds, *(type(side) for x in values if type(x) is tuple for side in x))
    if not all(map(_is_number, kinds)):
        return None
    try:
        layout = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    except RuntimeError:  # nested or sparse, and about to be refused
        return None
    return (
        layout, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        *options, values, kinds, backend, os.environ.get(dispatch.ENVIRONMENT),
    )  # fmt: skip


@cache
def _is_number(kind: type) -> bool:
    """Whether what is of this type never changes; a tensor's or an array's number may, in place."""
    return not hasattr(kind, "__setitem__") and "__call__" not in dir(kind)


def find(key: Hashable | None, q: Tensor) -> KnownCall | None:
    """The known call of this key, if it still holds."""
    try:
        known = _known.get(key)
    except TypeError:  # an argument that has no hash, and is about to be refused
        return None
    return known if known is not None and known.place == attention.place(q.dtype) else None


def keep(key: Hashable | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Remember a call that the Triton kernels serve, with q, k and v as the caller gave them."""
    if key is None or not options.plain:
        return
    kernels = attention.prepare(q, k, v, options)
    if kernels is not None:
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = KnownCall(options, kernels, attention.place(q.dtype))


def forget() -> None:
    """Check and work out every call anew: for tests and for measuring."""
    _known.clear()
