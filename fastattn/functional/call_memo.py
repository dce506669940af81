"""Memo of eager calls: checked options and prepared launches, keyed by layouts and options.

Most calls of a program are like an earlier one but for the contents of their tensors. All that the
host does for such a call up to the launch follows from the key here: shapes, strides, dtypes,
devices and alignment of tensors, values and types of numbers (True is not 1 to a check). It is done
once. Tensors are not kept: each call brings its own.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, tracing
from ..ops import attend
from ..options import Options
from ..torch_backend import dropout
from ..tuned import choices

_KEPT = 1024
_TYPES = (Tensor, torch.nn.Parameter)


class _Source(NamedTuple):
    """A field of `Options` that holds a tensor, and the option that gives it.

    option: its name; None: the seed of dropout, drawn at each call. leading: dims of 1 to be added.
    """

    field: int
    option: str | None
    leading: int = 0


class KnownCall(NamedTuple):
    """Checked options without their tensors, where those come from, and the prepared launch.

    dtype: of q as kernels get it. cast: autocast changes the dtype of q, or of another tensor.
    device_key: `ops.attend.device_key` as it was.
    """

    options: Options
    sources: tuple[_Source, ...]
    run: Any
    device: torch.device
    dtype: torch.dtype
    cast: bool
    device_key: Hashable

    def options_of(self, given: Mapping[str, Any]) -> Options:
        """The checked options of a call that was given these."""
        if not self.sources:
            return self.options
        fields = list(self.options)
        for field, option, leading in self.sources:
            if option is None:
                fields[field] = dropout.draw_seed(self.device)
            else:
                x = given[option]
                fields[field] = x[(None,) * leading] if leading else x
        # As `_make`, in half of its time.
        return tuple.__new__(Options, fields)


@lru_cache(_KEPT)
def _slot(key: Hashable) -> list[KnownCall]:
    """Where the known call of this key is, if there is one; the slots used last are kept."""
    return []


def key_of(
    inputs: tuple[Any, ...], given: Mapping[str, Any], backend: str | None
) -> list[Any] | None:
    """Key of a call in the memo; None for a call that is traced or of another kind.

    Conjugate and negative views have no key either: `ops.call.Operator` resolves them.

    Args:
        inputs: tensors that every such call has, q first. The launch looks at their alignment.
        given: all that the caller gave beside them, under the names that `keep` is told.
        backend: as the caller asked for it.
    """
    for x in inputs:
        if type(x) not in _TYPES:
            return None
    if tracing.may_be_traced(inputs[0]) or tracing.in_forward_mode():
        return None
    cast = tracing.autocast_dtype(inputs[0].device)
    key: list[Any] = [backend, os.environ.get(dispatch.ENVIRONMENT), cast]
    try:
        for x in inputs:
            if x.is_neg():
                return None
            key += (x.shape, x.stride(), x.dtype, x.device)
        for name, x in given.items():
            kind: Any = type(x)
            key += (name, kind)
            if kind in _TYPES:
                if x.is_neg():
                    return None
                key += layout(x)
            elif kind is tuple and all(map(_is_number, map(type, x))):  # as a window is
                key += (x, *map(type, x))
            elif _is_number(kind):
                key.append(x)
            else:
                return None
        if choices.by_direction:
            key += (torch.is_grad_enabled(), *(x.requires_grad for x in inputs))
    except RuntimeError:  # nested or sparse, and about to be refused
        return None
    return key


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """Properties of a tensor that checks and launches may depend on."""
    aligned = x.data_ptr() & 15 == 0
    return x.shape, x.stride(), x.dtype, x.device, aligned, x.requires_grad


@cache
def _is_number(kind: type) -> bool:
    """Whether what is of this type never changes; a tensor's or an array's number may, in place."""
    return kind is not tuple and not hasattr(kind, "__setitem__") and "__call__" not in dir(kind)


def find(key: list[Any] | None) -> KnownCall | None:
    """The known call of this key, if it still holds."""
    if key is None:
        return None
    try:
        slot = _slot(tuple(key))
    except TypeError:  # an argument that has no hash, and is about to be refused
        return None
    if not slot or slot[0].device_key != attend.device_key(slot[0].dtype):
        return None
    return slot[0]


def keep(
    key: list[Any] | None, q: Tensor, given: Mapping[str, Any], options: Options,
    prepare: Callable[[], Any], cast: bool = False,
) -> None:  # fmt: skip
    """Remember a call that kernels have served with the caller's own tensors, or their casts.

    Args:
        given: as `key_of` had it, but for what autocast made of it.
        options: what came of it.
        prepare: makes what runs such calls, or None where each is another.
        cast: as in `KnownCall`.
    """
    if key is None:
        return
    sources = _sources(given, options)
    run = None if sources is None else prepare()
    if sources is None or run is None:
        return
    fields = list(options)
    for source in sources:
        fields[source.field] = None
    _slot(tuple(key))[:] = [
        KnownCall(
            Options(*fields), sources, run, q.device, q.dtype, cast, attend.device_key(q.dtype)
        )
    ]


def _sources(given: Mapping[str, Any], options: Options) -> tuple[_Source, ...] | None:
    """Where the tensors in options come from.

    None where one was made for a single call, or a number was read from a tensor.
    """
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    sources = []
    for field, (name, x) in enumerate(zip(options._fields, options, strict=True)):
        if not isinstance(x, Tensor):
            continue
        if name == "dropout_seed" and given.get(name) is None:
            sources.append(_Source(field, None))
            continue
        options_like_it = [option for option, y in tensors.items() if _is_it(x, y)]
        # One tensor may be given twice; what is named as the field is meant by it.
        if name in options_like_it:
            options_like_it = [name]
        if len(options_like_it) != 1:
            return None
        (option,) = options_like_it
        sources.append(_Source(field, option, x.dim() - tensors[option].dim()))
    if set(tensors) != {source.option for source in sources} - {None}:
        return None
    return tuple(sources)


def _is_it(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, perhaps with leading dims of size 1."""
    if x is y:
        return True
    leading = x.dim() - y.dim()
    like = y[(None,) * leading] if leading > 0 else y
    same = (x.data_ptr(), x.dtype) == (y.data_ptr(), y.dtype)
    return same and x.shape == like.shape and x.stride() == like.stride()


def forget() -> None:
    """Check every call anew: for tests and for measuring."""
    _slot.cache_clear()
