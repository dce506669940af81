"""`append_paged`: append packed tokens to slots chosen by a server."""

from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..cache_view import CacheView
from ..ops import append as append_kernel
from ..rotary import RotaryStyle
from ..torch_backend import append as torch_append
from .append import serves
from .checks import Rotary, check_rotary, check_tokens
from .views import view_of_tensors, without_window


def append_paged(
    cache: Any,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    rotary: Rotary | None = None,
    rotary_style: RotaryStyle = "half",
    backend: str | None = None,
) -> Tensor | None:
    """Write packed tokens to given slots of a paged cache, in place.

    With `attention_paged` a step of a server, which manages lengths and block tables itself. With
    pages of 4 tokens, slot 9 is the second of page 2; slot_mapping = [9, -1, 3]:

        page 0   . . . k2        page 1   . . . .        page 2   . k0 . .

    One launch, which reads the slots on the device: the call does not wait, and its CUDA graph
    serves other slots. No store leaves its slot or the pool, whatever slots hold.

    Args:
        cache: a `CacheView` (`view_of_tensors` makes one of a server's tensors, with scales of
            int8 or e4m3 codes), whose lengths and table are ignored; or (k_pages [P, H_k, S, D],
            v_pages [P, H_k, S, D_v]), of any strides but the last.
        k: [total, H_k, D] in the cache's dtype, any strides, total at least n.
        v: [total, H_k, D_v], likewise. Tokens from n on are padding.
        slot_mapping: int32 or int64 [n]: page * S + offset for each of the first n tokens,
            distinct; -1: skip.
        q: [total, H_q, D], likewise; rotated into a new tensor.
        positions: int32 or int64 [n]: positions in the sequences, needed only for `rotary`.
        rotary: (cos, sin), fp32 [N, R // 2], from `fastattn.rotary.rotary_tables(N, R)`. Positions
            past them are not rotated.
        rotary_style: "half" or "interleaved", see `fastattn.rotary.apply_rotary`.
        backend: "triton", "torch" or "auto" (default; FASTATTN_BACKEND replaces it). torch waits
            for the device.
    Returns:
        The first n tokens of q, rotated; None without q.
    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; a ring; on a
            CPU also an invalid or repeated slot, and a position outside the tables. Then nothing is
            written.
        RuntimeError: k or v requires grad while grad mode is on.
    """
    view = _view(cache)
    checks.check_input("slot_mapping", slot_mapping, "integer", "n", view.k, {})
    n = slot_mapping.shape[0]
    k, v, q = _taken("k", k, n), _taken("v", v, n), None if q is None else _taken("q", q, n)
    check_tokens(k, v, view.k, view.v, 1, view.dtype, view.head_dim)
    check_rotary(rotary, rotary_style, q, k, 0)
    positions = _positions(positions, rotary, n, view.k)
    _check_values(slot_mapping, positions, rotary, view)
    slot_mapping = slot_mapping.contiguous()
    stores, k, values = view.written(k, v)
    buffers = (stores.k, stores.v, stores.k_scale, stores.v_scale)
    arguments = (buffers, q, k, values, slot_mapping, positions, rotary)
    with torch.no_grad():
        if serves(k, backend):
            interleaved = rotary_style == "interleaved"
            turned = append_kernel.append_to_slots(*arguments, interleaved=interleaved)
        else:
            scaled = view.given_scales
            turned = torch_append.append_to_slots(*arguments, rotary_style, given_scales=scaled)
    return None if turned is None else turned[0].transpose(0, 1)


def _view(cache: Any) -> CacheView:
    if isinstance(cache, CacheView):
        return without_window(cache, "its own append knows its slots")
    if not isinstance(cache, tuple) or len(cache) != 2:
        raise TypeError(
            "cache must be a CacheView or (k_pages, v_pages), "
            f"got {checks.type_name(cache)}; use its own append"
        )
    k, v = (
        checks.check_tensor(name, x) for name, x in zip(("k_pages", "v_pages"), cache, strict=True)
    )
    return view_of_tensors(k, v, k.new_zeros(0, dtype=torch.int32))


def _taken(name: str, x: Tensor, n: int) -> Tensor:
    """The first n tokens of x, as [1, heads, n, width]."""
    checks.check_tensor(name, x)
    if x.dim() != 3 or x.shape[0] < n:
        raise ValueError(
            f"{name} must have shape [total, heads, width] with total at least {n}, the number of "
            f"slots, got {list(x.shape)}"
        )
    return x[:n].transpose(0, 1)[None]


def _positions(
    positions: Tensor | None, rotary: Rotary | None, n: int, like: Tensor
) -> Tensor | None:
    if rotary is None:
        if positions is not None:
            raise ValueError("positions are for rotary=(cos, sin): give both or neither")
        return None
    if positions is None:
        raise ValueError(f"rotary needs positions, one for each of {n} tokens, got None")
    checks.check_input("positions", positions, "integer", "n", like, {"n": n})
    return positions.contiguous()


def _check_values(
    slots: Tensor, positions: Tensor | None, rotary: Rotary | None, view: CacheView
) -> None:
    """Check slots and positions, if on the CPU."""
    if not tracing.host_knows(slots):
        return
    room = view.k.shape[0] * view.page_size
    numbers = slots.tolist()
    for i, slot in enumerate(numbers):
        if not -1 <= slot < room:
            raise ValueError(
                f"slot_mapping must be -1 or from 0 to {room - 1}, the slots of the pool, "
                f"got {slot} for token {i}"
            )
    used = [slot for slot in numbers if slot >= 0]
    if len(set(used)) < len(used):
        twice = next(slot for slot in used if used.count(slot) > 1)
        raise ValueError(f"slot_mapping must name a slot once, got slot {twice} twice")
    if positions is not None and rotary is not None:
        reach = rotary[0].shape[0]
        for i, position in enumerate(positions.tolist()):
            if not 0 <= position < reach:
                raise ValueError(
                    f"positions must be from 0 to {reach - 1}, the rows of the rotary tables, "
                    f"got {position} for token {i}"
                )
