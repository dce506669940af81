"""Appending to a cache: which implementation does it, and the operator that tracers see."""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..cache_view import CacheView
from ..dispatch import ENVIRONMENT
from ..rotary import RotaryStyle
from ..torch_backend import append as torch_append
from . import call
from .call import Operator, fake_in_layout, kernel


def append(
    view: CacheView,
    k: Tensor,
    v: Tensor,
    new_lengths: Tensor | None = None,
    *,
    q: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_style: RotaryStyle = "half",
    advance: bool = True,
    first_slot: int | None = None,
    room_for_padding: bool = False,
    backend: str | None = None,
) -> Tensor | None:
    """Write T new tokens behind every row of the view, in place; shapes are not checked.

    Token i of batch row b gets position p = lengths[r] + i, r being its row of the cache. Its key,
    and its query, are rotated to p; then key and value are stored, as codes if the cache holds
    codes. A cache's own `append` checks, makes room, and calls this.

    Lengths, table and index are the device's, and nobody waits for their values. So that no store
    leaves its row, a token with no place in it is counted but not stored: one at a negative
    position, past the end of the row (its slots, or its columns of the table; a ring has no end),
    or in a page whose number is none of the pool's. Where the tables of rotary do not reach,
    nothing is rotated. Where batch_index names no row, the kernel passes over the tokens and torch
    raises IndexError on a CPU.

    Args:
        view: of a cache with room for the tokens. Its buffers and lengths change.
        k: [B, H_k, T, D] in the view's dtype, any strides.
        v: [B, H_k, T, D_v], likewise.
        new_lengths: int32 or int64 [B], clamped to [0, T]: how many of the T are tokens; the others
            are padding. None: all.
        q: [B, H_q, T, D], likewise; left as it is.
        rotary: (cos, sin), fp32 [N, R // 2], a row for every position, as
            `rotary.rotary_tables(N, R)` makes them.
        advance: count the tokens in `lengths`. False: they are counted already, and are written at
            positions lengths[r] - new_lengths[b] + i. So do the layers that share one `lengths`:
            the first one advances, the others write beside it.
        first_slot: a promise that every row's first token goes to this slot of a contiguous cache
            and none is padding, which lets torch copy one block.
        room_for_padding: a promise that every row has T free slots, which spares torch a wait for
            the device; the slots of padding are then undefined.
        backend: "triton", "torch", or "auto" (default; FASTATTN_BACKEND replaces it), which takes
            the kernel for tensors on a GPU.
    Returns:
        q rotated, in a new tensor; None without q.
    Raises:
        ValueError: the backend is unknown, or "triton" cannot serve these tensors.
    """
    if not serves(k, backend):
        return torch_append.append_rows(
            view, q, k, v, new_lengths, rotary, rotary_style,
            advance=advance, first_slot=first_slot, room_for_padding=room_for_padding,
        )  # fmt: skip
    cos, sin = (None, None) if rotary is None else rotary
    turned = append_tokens(
        q,
        k,
        v,
        new_lengths,
        view.k,
        view.v,
        view.k_scale,
        view.v_scale,
        view.lengths,
        view.counters,
        view.block_table,
        view.batch_index,
        cos,
        sin,
        view.keep_first,
        rotary_style == "interleaved",
        advance,
    )
    return None if q is None else turned


def serves(k: Tensor, backend: str | None) -> bool:
    """Whether the kernel appends k, else torch.

    Raises:
        ValueError: as `append`.
    """
    forced = checks.check_backend(backend)
    if forced == "auto" and (named := os.environ.get(ENVIRONMENT)):
        forced = checks.check_backend(named, ENVIRONMENT)
    if forced == "torch":
        return False
    reason = _why_not_kernel(k)
    if forced == "triton" and reason is not None:
        raise ValueError(f'backend "triton" cannot append to this cache: {reason}')
    # Interpreted, the kernel only serves who asks for it: torch writes the same at once.
    return reason is None and (forced == "triton" or not k.is_cpu)


def _why_not_kernel(k: Tensor) -> str | None:
    if not call.TRITON_INSTALLED:
        return "triton is not installed"
    if k.is_cpu and not call.interpreting():
        return "k is on the CPU and TRITON_INTERPRET=1 is not set"
    if k.device.type not in ("cpu", "cuda"):
        return f"k is on {k.device.type}; kernels exist for CUDA and ROCm devices"
    if k.dtype == torch.float64:
        return "k is float64; kernels exist for float16, bfloat16 and float32"
    return None


_STORED = ("k_cache", "v_cache", "k_scale", "v_scale", "lengths", "counters")


@partial(Operator, mutates_args=_STORED)
def append_tokens(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    new_lengths: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    lengths: Tensor,
    counters: Tensor,
    block_table: Tensor | None,
    batch_index: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    keep_first: int | None,
    interleaved: bool,
    advance: bool,
) -> Tensor:
    """q rotated, or an empty tensor without q; see `kernels.append.launch_append`."""
    append = kernel("append")
    tensors = append.CacheTensors(
        k_cache, v_cache, k_scale, v_scale, block_table, lengths, counters, batch_index, keep_first
    )
    turned = append.launch_append(
        q, k, v, new_lengths, tensors, cos, sin, interleaved=interleaved, advance=advance
    )
    return k.new_empty(0) if turned is None else turned


@append_tokens.op.register_fake
def _(q: Tensor | None, k: Tensor, *_: Any) -> Tensor:
    return k.new_empty(0) if q is None else fake_in_layout(q, *q.shape[1:])
