"""Packed queries over a cache by their kernel, as an operator of torch.library."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from .. import kernels, tracing
from ..cache_view import CacheView
from ..options import Options
from . import flops
from .call import Operator, contiguous


@partial(Operator, flops=flops.packed_over_cache)
def paged_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    batch_index: Tensor | None,
    cu_seqlens: Tensor,
    out: Tensor | None,
    longest: int,
    invariant: bool,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """o and lse; see `kernels.paged.launch_paged`. out: o, for calls that nothing traces."""
    tensors = kernels.pages.CacheTensors(
        k, v, k_scale, v_scale, block_table, lengths, lengths, batch_index, None
    )
    o, lse = results(q, v.shape[3], out)
    kernels.paged.launch_paged(
        q, cu_seqlens, tensors, starts, o, lse, options, longest=longest, invariant=invariant
    )
    return o, lse


@paged_forward.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return results(q, v.shape[3], None)


def results(q: Tensor, width: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """out, or a new o [total, H_q, width], and an empty lse fp32 [H_q, total]."""
    total, H_q, _ = q.shape
    o = q.new_empty(total, H_q, width) if out is None else out
    return o, q.new_empty(H_q, total, dtype=torch.float32)


def attend(
    q: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    out: Tensor | None,
    options: Options,
    longest: int,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """o [total, H_q, D_v], which is out if that is given, and lse [H_q, total]."""
    # An operator that tracers know writes into nothing: there the result is copied.
    into = None if tracing.may_be_traced(q) else out
    o, lse = paged_forward(
        q if q.stride(-1) == 1 else q.contiguous(),
        view.k,
        view.v,
        view.k_scale,
        view.v_scale,
        view.block_table,
        view.lengths,
        view.starts,
        view.batch_index,
        cu_seqlens,
        into,
        longest,
        invariant,
        options,
    )
    return o if out is into else out.copy_(o), lse  # type: ignore[union-attr]


Paged: TypeAlias = Callable[
    [Tensor, CacheView, Tensor, Tensor | None, Options], tuple[Tensor, Tensor]
]


def prepare(
    q: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    out: Tensor | None,
    options: Options,
    longest: int,
    invariant: bool,
) -> Paged | None:
    """`attend` for calls with the signature of this one, ready to launch; None as `decode.prepare`
    has it.
    """
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return None
    if q.stride(-1) != 1 or contiguous(options) is not options or options.launched_anew:
        return None
    width = view.v.shape[3]
    o, lse = results(q, width, out)
    launch = kernels.paged.prepare_paged(
        q, cu_seqlens, _tensors(view), view.starts, o, lse, options,
        longest=longest, invariant=invariant,
    )  # fmt: skip

    def paged(
        q: Tensor, view: CacheView, cu_seqlens: Tensor, out: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        o, lse = results(q, width, out)
        launch(q, cu_seqlens, _tensors(view), view.starts, o, lse, options)
        return o, lse

    return paged


def _tensors(view: CacheView) -> "kernels.pages.CacheTensors":
    return kernels.pages.CacheTensors(
        view.k, view.v, view.k_scale, view.v_scale, view.block_table, view.lengths, view.lengths,
        view.batch_index, None,
    )  # fmt: skip
