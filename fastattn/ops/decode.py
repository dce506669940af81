"""torch.library operators of attention to a cache, with padded or packed rows."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .. import kernels, tracing
from ..cache_view import CacheView
from ..options import Options
from . import flops
from .call import fake_output, may_be_kept, operator


@operator(flops.decoded)
def decode_forward(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, lengths: Tensor, starts: Tensor | None, new_lengths: Tensor | None,
    batch_index: Tensor | None, rope: Tensor | None, pinned: int | None, splits: int | None,
    options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, with rows padded to multiples of 16 bytes, and lse; see `kernels.decode.launch_decode`."""
    of_keys = (k, v, k_scale, v_scale, rope)
    tensors = _tensors(of_keys, block_table, lengths, batch_index, pinned)
    return kernels.decode.launch_decode(q, tensors, starts, new_lengths, options, splits=splits)


@decode_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    elements = 16 // q.element_size()
    return fake_output(q, -(-v.shape[3] // elements) * elements)


def attend(
    q: Tensor, view: CacheView, new_lengths: Tensor | None, options: Options, splits: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B, H_q, T_q, D_v] and lse."""
    o, lse = decode_forward(
        q if q.stride(-1) == 1 else q.contiguous(), *_stored(view), view.starts, new_lengths,
        view.batch_index, view.rope, view.keep_first, splits, options,
    )  # fmt: skip
    return o[..., : view.v.shape[3]] if o.shape[3] != view.v.shape[3] else o, lse


# uniform: as for `torch_backend.decode.attend`; kernels read lengths on the device.
Decode: TypeAlias = Callable[
    [Tensor, CacheView, Tensor | None, Options, int | None], Tensor | tuple[Tensor, Tensor]
]


def prepare(
    q: Tensor, view: CacheView, new_lengths: Tensor | None, options: Options, splits: int | None,
    return_lse: bool,
) -> Decode | None:  # fmt: skip
    """Cached `attend` for calls with this signature.

    Valid while `attention.device_key` is unchanged. None if the launch cannot be cached: not on the
    current device, if tensors must be copied, or with users' functions.
    """
    if q.stride(-1) != 1 or not may_be_kept(q, options):
        return None
    launch = kernels.decode.prepare_decode(
        q, _of_view(view), view.starts, new_lengths, options, splits=splits
    )  # fmt: skip
    width = view.v.shape[3]

    def decode(
        q: Tensor, view: CacheView, new_lengths: Tensor | None, options: Options,
        uniform: int | None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        o, lse = launch(q, _of_view(view), view.starts, new_lengths, options)
        o = o if o.shape[3] == width else o[..., :width]
        return (o, lse) if return_lse else o

    return decode


@operator(flops.packed_over_cache)
def paged_forward(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, lengths: Tensor, starts: Tensor | None, batch_index: Tensor | None,
    rope: Tensor | None, cu_seqlens: Tensor, out: Tensor | None, longest: int, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse; see `kernels.decode.launch_packed`. out: o, for untraced calls."""
    of_keys = (k, v, k_scale, v_scale, rope)
    tensors = _tensors(of_keys, block_table, lengths, batch_index, None)
    o, lse = results(q, v.shape[3], out)
    kernels.decode.launch_packed(q, cu_seqlens, tensors, starts, o, lse, options, longest=longest)
    return o, lse


@paged_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return results(q, v.shape[3], None)


def results(q: Tensor, width: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """out, or a new o [total, H_q, width], and an empty lse fp32 [H_q, total]."""
    total, H_q, _ = q.shape
    o = q.new_empty(total, H_q, width) if out is None else out
    return o, q.new_empty(H_q, total, dtype=torch.float32)


def attend_packed(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, out: Tensor | None, options: Options,
    longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [total, H_q, D_v] (in out, if given), and lse [H_q, total]."""
    # A traced operator must not mutate out, so the result is copied.
    into = None if tracing.may_be_traced(q) else out
    o, lse = paged_forward(
        q if q.stride(-1) == 1 else q.contiguous(), *_stored(view), view.starts, view.batch_index,
        view.rope, cu_seqlens, into, longest, options,
    )  # fmt: skip
    return o if out is into else out.copy_(o), lse  # type: ignore[union-attr]


Packed: TypeAlias = Callable[
    [Tensor, CacheView, Tensor, Tensor | None, Options], Tensor | tuple[Tensor, Tensor]
]


def prepare_packed(
    q: Tensor, view: CacheView, cu_seqlens: Tensor, out: Tensor | None, options: Options,
    longest: int, return_lse: bool,
) -> Packed | None:  # fmt: skip
    """Cached `attend_packed` for calls with this signature; None as in `prepare`."""
    if q.stride(-1) != 1 or not may_be_kept(q, options):
        return None
    width = view.v.shape[3]
    o, lse = results(q, width, out)
    launch = kernels.decode.prepare_packed(
        q, cu_seqlens, _of_view(view), view.starts, o, lse, options, longest=longest
    )  # fmt: skip

    def paged(
        q: Tensor, view: CacheView, cu_seqlens: Tensor, out: Tensor | None, options: Options
    ) -> Tensor | tuple[Tensor, Tensor]:
        o, lse = results(q, width, out)
        launch(q, cu_seqlens, _of_view(view), view.starts, o, lse, options)
        return (o, lse) if return_lse else o

    return paged


def one_memory(
    k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> bool:
    """Whether v and its scales are the first columns of k and its scales: one load serves both."""
    if k.stride() != v.stride() or v.shape[-1] > k.shape[-1] or not _alike(k_scale, v_scale):
        return False
    return _alike(k, v)


def _stored(
    view: CacheView,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Tensors of a view in the order of operators."""
    return view.k, view.v, view.k_scale, view.v_scale, view.block_table, view.lengths


def _alike(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors begin at one place in memory with the same strides, or neither exists."""
    if x is None or y is None or torch.compiler.is_compiling():
        return x is y
    try:
        return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()
    except RuntimeError:  # one that is traced or mapped has no memory
        return x is y


def _tensors(
    of_keys: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    block_table: Tensor | None, lengths: Tensor, batch_index: Tensor | None, pinned: int | None,
) -> "kernels.pages.CacheTensors":  # fmt: skip
    """Tensors of a view for launchers; k, v, their scales and rope first."""
    k, v, k_scale, v_scale, rope = of_keys
    shared = rope is not None or one_memory(k, v, k_scale, v_scale)
    if rope is not None:
        k, k_scale = rope, None
    elif shared:
        # Without further columns nothing is read of k.
        k = k[..., v.shape[-1] :] if k.shape[-1] > v.shape[-1] else v
    return kernels.pages.CacheTensors(
        k, v, k_scale, v_scale, block_table, lengths, lengths, batch_index, pinned, shared
    )


def _of_view(view: CacheView) -> "kernels.pages.CacheTensors":
    """`_tensors` of a view; each decoding step waits for this."""
    of_keys = (view.k, view.v, view.k_scale, view.v_scale, view.rope)
    return _tensors(of_keys, view.block_table, view.lengths, view.batch_index, view.keep_first)
