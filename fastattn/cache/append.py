"""Append to a cache, by the kernel or torch."""

from torch import Tensor

from .. import dispatch
from ..cache_view import CacheView
from ..ops import append as append_kernel
from ..rotary import RotaryStyle
from ..torch_backend import append as torch_append


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
    """Append T new tokens to every row of the view, in place; shapes are not checked.

    Token i of batch row b gets position p = lengths[r] + i in cache row r. Its key and query are
    rotated to p, then key and value are stored, as codes if the cache is quantised. A cache's own
    `append` checks, makes room, and calls this.

    Lengths, table and index are read on the device only. No store leaves its row: a token at a
    negative position, past the end of the row (its slots, or its columns of the table; a ring has
    no end), or in an invalid page is counted but not stored. Positions past the rotary tables are
    not rotated. For an invalid batch_index, the kernel skips the tokens and torch raises IndexError
    on a CPU.

    Args:
        view: of a cache with room for the tokens; modified in place.
        k: [B, H_k, T, D] in the view's dtype, any strides.
        v: [B, H_k, T, D_v], likewise.
        new_lengths: int32 or int64 [B], clamped to [0, T]: number of tokens; the others are
            padding. None: all.
        q: [B, H_q, T, D], likewise; not modified.
        rotary: (cos, sin), fp32 [N, R // 2] by position, from `rotary.rotary_tables(N, R)`.
        advance: add the tokens to `lengths`. False: `lengths` already includes them, and they are
            written at positions lengths[r] - new_lengths[b] + i. Of several layers with one
            `lengths`, only the first advances.
        first_slot: promises that every row's first token goes to this slot of a contiguous cache,
            without padding, so that torch can copy one block.
        room_for_padding: promises that every row has T free slots, so that torch need not wait for
            the device; slots of padding are then undefined.
        backend: "triton", "torch", or "auto" (default; FASTATTN_BACKEND replaces it): the kernel on
            a GPU.
    Returns:
        Rotated q, in a new tensor; None without q.
    Raises:
        ValueError: the backend is unknown, or "triton" cannot serve these tensors.
    """
    view, k, values = view.written(k, v)
    if not serves(k, backend):
        return torch_append.append_rows(
            view,
            q,
            k,
            values,
            new_lengths,
            rotary,
            rotary_style,
            advance=advance,
            first_slot=first_slot,
            room_for_padding=room_for_padding,
        )
    interleaved = rotary_style == "interleaved"
    return append_kernel.append(
        view, q, k, values, new_lengths, rotary, interleaved=interleaved, advance=advance
    )


def serves(k: Tensor, backend: str | None) -> bool:
    """Whether the kernel appends k, not torch; raises as `append`."""
    return dispatch.takes_kernel("append to this cache", backend, {"k": k}, "append")
