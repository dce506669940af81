"""Attention to a cache by its kernel, as an operator of torch.library."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from .. import kernels
from ..cache_view import CacheView
from ..options import Options
from . import flops
from .call import Operator, contiguous, fake_output


@partial(Operator, flops=flops.decoded)
def decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    new_lengths: Tensor | None,
    batch_index: Tensor | None,
    pinned: int | None,
    splits: int | None,
    invariant: bool,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o, its rows padded to whole 16 bytes, and lse; see `kernels.decode.launch_decode`."""
    tensors = kernels.pages.CacheTensors(
        k, v, k_scale, v_scale, block_table, lengths, lengths, batch_index, pinned
    )
    return kernels.decode.launch_decode(
        q, tensors, starts, new_lengths, options, splits=splits, invariant=invariant
    )


@decode_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    elements = 16 // q.element_size()
    return fake_output(q, -(-v.shape[3] // elements) * elements)


def attend(
    q: Tensor,
    view: CacheView,
    new_lengths: Tensor | None,
    options: Options,
    splits: int | None,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] and lse."""
    o, lse = decode_forward(
        q if q.stride(-1) == 1 else q.contiguous(),
        view.k,
        view.v,
        view.k_scale,
        view.v_scale,
        view.block_table,
        view.lengths,
        view.starts,
        new_lengths,
        view.batch_index,
        view.keep_first,
        splits,
        invariant,
        options,
    )
    return o[..., : view.v.shape[3]] if o.shape[3] != view.v.shape[3] else o, lse


Decode: TypeAlias = Callable[[Tensor, CacheView, Tensor | None, Options], tuple[Tensor, Tensor]]


def prepare(
    q: Tensor,
    view: CacheView,
    new_lengths: Tensor | None,
    options: Options,
    splits: int | None,
    invariant: bool,
) -> Decode | None:
    """`attend` for calls with the signature of this one, ready to launch.

    It is good as long as `attention.device_key` is the same. None where such a call needs a launch
    of its own: on a device that is not the current one, for tensors that kernels cannot read as
    they lie, and with users' functions.
    """
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return None
    if q.stride(-1) != 1 or contiguous(options) is not options:
        return None
    launch = kernels.decode.prepare_decode(
        q, _tensors(view), view.starts, new_lengths, options,
        splits=splits, invariant=invariant,
    )  # fmt: skip
    if launch is None:
        return None
    width = view.v.shape[3]

    def decode(
        q: Tensor, view: CacheView, new_lengths: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        o, lse = launch(q, _tensors(view), view.starts, new_lengths, options)
        return o if o.shape[3] == width else o[..., :width], lse

    return decode


def _tensors(view: CacheView) -> "kernels.pages.CacheTensors":
    """Collect the tensors of a view in the form that launchers take."""
    return kernels.pages.CacheTensors(
        view.k, view.v, view.k_scale, view.v_scale, view.block_table, view.lengths, view.lengths,
        view.batch_index, view.keep_first,
    )  # fmt: skip
