"""torch.library operator that appends to a cache."""

from torch import Tensor

from .. import kernels
from ..cache_view import CacheView
from . import flops
from .call import fake_in_layout, operator

_STORED = ("k_cache", "v_cache", "k_scale", "v_scale", "lengths", "counters")


@operator(flops.nothing, _STORED)
def append_tokens(
    q: Tensor | None, k: Tensor, v: Tensor | None, new_lengths: Tensor | None, k_cache: Tensor,
    v_cache: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, lengths: Tensor | None,
    counters: Tensor | None, block_table: Tensor | None, batch_index: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, keep_first: int | None, interleaved: bool,
    advance: bool, slots: Tensor | None, positions: Tensor | None,
) -> Tensor:  # fmt: skip
    """Rotated q, or an empty tensor without q; see `kernels.append.launch_append`."""
    tensors = kernels.pages.CacheTensors(
        k_cache,
        k_cache if v_cache is None else v_cache,
        k_scale,
        v_scale,
        block_table,
        lengths,
        counters,
        batch_index,
        keep_first,
    )
    turned = kernels.append.launch_append(
        q, k, v, new_lengths, tensors, cos, sin, interleaved=interleaved, advance=advance,
        slots=slots, positions=positions,
    )  # fmt: skip
    return k.new_empty(0) if turned is None else turned


@append_tokens.op.register_fake
def _(q: Tensor | None, k: Tensor, *_: object) -> Tensor:
    return k.new_empty(0) if q is None else fake_in_layout(q, *q.shape[1:])


def append(
    view: CacheView, q: Tensor | None, k: Tensor, v: Tensor | None, new_lengths: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None, *, interleaved: bool, advance: bool,
) -> Tensor | None:  # fmt: skip
    """Append k and v [B, H_k, T, D] to the view's rows, in place; return rotated q, or None.

    v: None where keys hold the values.
    """
    cos, sin = (None, None) if rotary is None else rotary
    values = (None, None) if v is None else (view.v, view.v_scale)
    turned = append_tokens(
        q, k, v, new_lengths, view.k, values[0], view.k_scale, values[1], view.lengths,
        view.counters, view.block_table, view.batch_index, cos, sin, view.keep_first, interleaved,
        advance, None, None,
    )  # fmt: skip
    return None if q is None else turned


def append_to_slots(
    buffers: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], q: Tensor | None,
    k: Tensor, v: Tensor | None, slots: Tensor, positions: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None, *, interleaved: bool,
) -> Tensor | None:  # fmt: skip
    """Write k and v [1, H_k, T, D] to slots of K, V and their scales; return rotated q, or None."""
    cos, sin = (None, None) if rotary is None else rotary
    if v is None:
        buffers = (buffers[0], None, buffers[2], None)
    # Without lengths, counters, block_table and batch_index.
    turned = append_tokens(
        q, k, v, None, *buffers, None, None, None, None, cos, sin, None, interleaved, False, slots,
        positions,
    )  # fmt: skip
    return None if q is None else turned
