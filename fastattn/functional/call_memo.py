"""Memo of eager calls: checked options and what computes them, keyed by layouts and options.

Most calls differ from an earlier one only in tensor contents. The host's work before the launch
depends only on the key: shapes, strides, dtypes, devices and alignment of tensors, values and types
of numbers (checks distinguish True from 1). It is done once per key. No tensor is kept.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch, tracing
from ..block_mask import BlockMask, TensorFunction
from ..ops import attention_ops, spread
from ..ops.call import TRITON_INSTALLED, from_compiler
from ..options import Options
from ..torch_backend import dropout
from ..tuned import choices

_KEPT = 1024
_TYPES = (Tensor, torch.nn.Parameter)
_HOLDERS = (BlockMask, TensorFunction)


class _Source(NamedTuple):
    """A tensor field of `Options`, and the option that it comes from.

    option: its name; None: the dropout seed, drawn at each call. leading: dims of size 1 to add.
    """

    field: int
    option: str | None
    leading: int = 0


class KnownCall(NamedTuple):
    """Checked options without tensors, the tensors' sources, and what computes the result.

    run: a prepared launch, or torch's function with its flags; takes the call's tensors and
    options. dtype: of q in the kernels. cast: autocast changes a tensor's dtype. device_key:
    `ops.attention_ops.device_key` at preparation; None: independent of a device.
    """

    options: Options
    sources: tuple[_Source, ...]
    run: Any
    device: torch.device
    dtype: torch.dtype
    cast: bool
    device_key: Hashable

    def options_of(self, arguments: Mapping[str, Any]) -> Options:
        """Checked options of a call with these options."""
        if not self.sources:
            return self.options
        fields = list(self.options)
        for field, option, leading in self.sources:
            if option is None:
                fields[field] = dropout.draw_seed(self.device)
            else:
                x = arguments[option]
                fields[field] = x[(None,) * leading] if leading else x
        # `_make`, in half the time.
        return tuple.__new__(Options, fields)


@lru_cache(_KEPT)
def _slot(key: Hashable) -> list[KnownCall]:
    """LRU slot of this key's call, if any."""
    return []


def key_of(
    inputs: tuple[Any, ...], arguments: Mapping[str, Any], backend: str | None, return_lse: bool
) -> list[Any] | None:
    """Memo key of a call; None for traced and other unsuitable calls.

    Conjugate and negative views have no key; `ops.call.Operator` resolves them.

    Args:
        inputs: tensors of every such call, q first. The launch depends on their alignment.
        arguments: other arguments, named as for `first`.
        backend, return_lse: the caller's arguments.
    """
    for x in inputs:
        if type(x) not in _TYPES:
            return None
    if tracing.may_be_traced(inputs[0]) or tracing.in_forward_mode():
        return None
    cast = None
    if torch._C._is_any_autocast_enabled():
        cast = tracing.autocast_dtype(inputs[0].device)
    key: list[Any] = [backend, return_lse, dispatch.raw_name(), cast]
    try:
        for x in inputs:
            if x.is_neg():
                return None
            key += (x.shape, x.stride(), x.dtype, x.device)
        if not add_values(key, arguments):
            return None
        if choices.by_direction:
            key += (torch.is_grad_enabled(), *(x.requires_grad for x in inputs))
    except RuntimeError:  # nested or sparse, to be refused later
        return None
    return key


def add_values(key: list[Any], arguments: Mapping[str, Any]) -> bool:
    """Extend a key by arguments; False: one is unsuitable."""
    for name, x in arguments.items():
        kind: Any = type(x)
        key += (name, kind)
        if kind in _TYPES:
            if x.is_neg():
                return False
            key += layout(x)
        elif kind is tuple and all(map(_is_number, map(type, x))):  # such as a window
            key += (x, *map(type, x))
        elif kind in _HOLDERS and x.tensors is not None:
            return False
        elif _is_number(kind):
            key.append(x)
        else:
            return False
    return True


def layout(x: Tensor) -> tuple[Hashable, ...]:
    """Properties of a tensor on which checks and launches may depend."""
    aligned = x.data_ptr() & 15 == 0
    return x.shape, x.stride(), x.dtype, x.device, aligned, x.requires_grad


@cache
def _is_number(kind: type) -> bool:
    """Whether values of this type are immutable numbers, unlike a tensor's or an array's."""
    return kind is not tuple and not hasattr(kind, "__setitem__") and "__call__" not in dir(kind)


def find(key: list[Any] | None) -> KnownCall | None:
    """The call of this key, if still valid."""
    # Inlined, as every known call runs this.
    changed = F.scaled_dot_product_attention is not spread.TORCH_ATTENTION
    if key is None or ((changed or spread.attend is not None) and spread.why_partial() is not None):
        return None
    try:
        slot = _slot(tuple(key))
    except TypeError:  # an unhashable argument, to be refused later
        return None
    if not slot:
        return None
    cached = slot[0]
    if cached.device_key is None or cached.device_key == attention_ops.device_key(cached.dtype):
        return cached
    return None


def first(
    run: Callable[..., Any] | None, call: tuple[Any, ...], key: list[Any] | None,
    arguments: Mapping[str, Any], options: Options, *, cast: bool = False, by_torch: bool = False,
) -> Any:  # fmt: skip
    """Results of run(*call), which serves later calls of this key too.

    None: there is no such function, or a kernel does not compile.

    Args:
        run: of the caller's own tensors, or their casts; None: nothing to store.
        call: q first.
        arguments: as in `key_of`, after autocast.
        options: the checked options.
        cast: as in `KnownCall`.
        by_torch: no kernel serves the call.
    """
    if run is None:
        return None
    try:
        results = run(*call)
    except Exception as error:
        if by_torch or not from_compiler(error):
            raise
        return None
    # A device that Triton drives has kernels or findings that may come to serve the call.
    drives = TRITON_INSTALLED and call[0].is_cuda
    if key is not None and (not by_torch or call[0].is_cpu or drives):
        _keep(run, call[0], key, arguments, options, cast, by_torch)
    return results


def _keep(
    run: Callable[..., Any], q: Tensor, key: list[Any], arguments: Mapping[str, Any],
    options: Options, cast: bool, by_torch: bool,
) -> None:  # fmt: skip
    sources = _sources(arguments, options)
    if sources is None:
        return
    fields = list(options)
    for source in sources:
        fields[source.field] = None
    device_key = None if by_torch and q.is_cpu else attention_ops.device_key(q.dtype)
    _slot(tuple(key))[:] = [
        KnownCall(Options(*fields), sources, run, q.device, q.dtype, cast, device_key)
    ]


def _sources(arguments: Mapping[str, Any], options: Options) -> tuple[_Source, ...] | None:
    """Sources of the tensors in options.

    None if one was made for a single call, or a number was read from a tensor.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    sources = []
    for field, (name, x) in enumerate(zip(options._fields, options, strict=True)):
        if not isinstance(x, Tensor):
            continue
        if name == "dropout_seed" and arguments.get(name) is None:
            sources.append(_Source(field, None))
            continue
        options_like_it = [option for option, y in tensors.items() if _is_it(x, y)]
        # If a tensor is passed twice, the option with the field's name is its source.
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
    """Whether x is y, up to leading dims of size 1."""
    if x is y:
        return True
    leading = x.dim() - y.dim()
    like = y[(None,) * leading] if leading > 0 else y
    same = (x.data_ptr(), x.dtype) == (y.data_ptr(), y.dtype)
    return same and x.shape == like.shape and x.stride() == like.stride()


def forget() -> None:
    """Clear the memo, for tests and benchmarks."""
    _slot.cache_clear()
