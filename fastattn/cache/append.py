"""Appending to a cache: which backend writes the new tokens."""

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
            view,
            q,
            k,
            v,
            new_lengths,
            rotary,
            rotary_style,
            advance=advance,
            first_slot=first_slot,
            room_for_padding=room_for_padding,
        )
    interleaved = rotary_style == "interleaved"
    return append_kernel.append(
        view, q, k, v, new_lengths, rotary, interleaved=interleaved, advance=advance
    )


def serves(k: Tensor, backend: str | None) -> bool:
    """Whether the kernel appends k, else torch.

    Raises:
        ValueError: as `append`.
    """
    return dispatch.takes_kernel("append to this cache", backend, {"k": k}, "append")
