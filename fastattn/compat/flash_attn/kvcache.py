"""flash-attn's KV caches, read and written in place.

flash-attn's caches are [B, S, H_k, D], or pages of that shape; transposed, they are those of a
`CacheView`. cache_batch_idx is a table of one page a row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks, tracing
from ...cache.append import append
from ...cache.checks import check_tokens, check_view_values
from ...cache.views import view_of_tensors
from ...cache_view import CacheView
from ...functional.decode import decode_attention
from ...rotary import apply_rotary
from .rotary import table_rows

# Untyped, as the overloads take only a literal return_lse.
_decode: Any = decode_attention


class Cache(NamedTuple):
    """Arguments of `flash_attn_with_kvcache` that locate tokens."""

    k: Tensor
    v: Tensor
    seqlens: Any
    batch_index: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None


def append_and_attend(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None],
    interleaved: bool,
    options: dict[str, Any],
    num_splits: int | None,
    return_lse: bool,
    qv: Tensor | None = None,
) -> Any:
    """Write k and v into the cache, then attend: o [B, H_q, T_q, D_v], or (o, lse)."""
    if qv is not None:
        options = {"scale": (q.shape[-1] + qv.shape[-1]) ** -0.5, **options}
        if (whole := _in_one(cache.k, cache.v)) is not None:
            if rotary[0] is not None:
                raise RuntimeError("rotary_cos must be None where the caches share a buffer")
            both = None if new[0] is None or new[1] is None else torch.cat((new[1], new[0]), -1)
            q, new = torch.cat((qv, q), -1), (both, new[1])
            cache, qv = cache._replace(k=whole, v=whole[..., : cache.v.shape[-1]]), None
    _check_together(cache, new, rotary)
    k, v = (None if x is None else x.transpose(1, 2) for x in new)
    q = q.transpose(1, 2)
    B = q.shape[0]
    if k is not None and v is not None:
        like = (cache.k.transpose(1, 2), cache.v.transpose(1, 2))
        check_tokens(k, v, *like, B, cache.k.dtype)
    with torch.no_grad():
        view = view_of(cache, B, 0 if k is None else k.shape[2])
        cos, sin = rotary
        style: Any = "interleaved" if interleaved else "half"
        tables = None if cos is None or sin is None else (cos.float(), sin.float())
        if tables is not None:
            q = _rotated(
                q, view.lengths, tables, style, moving=options["causal"] or "window" in options
            )
        if k is not None and v is not None:
            append(view, k, v, rotary=tables, rotary_style=style)
        if qv is not None:  # a copy of keys and values as keys of the second product
            q, whole = torch.cat((qv.transpose(1, 2), q), -1), torch.cat((view.v, view.k), -1)
            view = view._replace(k=whole, v=whole[..., : view.v.shape[-1]])
        return _decode(q, view, num_splits=num_splits, return_lse=return_lse, **options)


def _in_one(k: Tensor, v: Tensor) -> Tensor | None:
    """Return the one buffer of v and k, in this order in each row, as in servers' latent caches.

    None if they are separate.
    """
    width = v.shape[-1]
    adjacent = k.data_ptr() == v.data_ptr() + width * v.element_size()
    if not adjacent or k.stride() != v.stride() or k.shape[:-1] != v.shape[:-1]:
        return None
    return v.as_strided((*v.shape[:-1], width + k.shape[-1]), v.stride())


def _check_together(
    cache: Cache,
    new: tuple[Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raise RuntimeError for combinations of arguments that flash-attn refuses."""
    k, v = new
    if (k is None) != (v is None):
        raise RuntimeError("k and v must be given together")
    if k is not None and cache.seqlens is None:
        raise RuntimeError("cache_seqlens must be given with k and v: they are written behind it")
    if (rotary[0] is None) != (rotary[1] is None):
        raise RuntimeError("rotary_cos and rotary_sin must be given together")
    if rotary[0] is not None and k is None:
        raise RuntimeError("rotary_cos and rotary_sin rotate new keys: k and v must be given")
    if cache.block_table is not None and cache.batch_index is not None:
        raise RuntimeError(
            "cache_batch_idx must be None with a block_table, whose rows are the batch"
        )
    if cache.block_table is not None and cache.leftpad is not None:
        raise RuntimeError("cache_leftpad must be None with a block_table")
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.stride(-1) != 1:
            raise RuntimeError(f"{name} must have a last stride of 1, got strides {x.stride()}")


def view_of(cache: Cache, B: int, new: int) -> CacheView:
    """A view of the cache for B rows, whose lengths are a copy.

    Raises:
        RuntimeError: lengths that the host knows leave no room for `new` tokens.
        ValueError: a length, row or page that the host knows is not in the cache.
    """
    k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
    table = starts = None
    if cache.block_table is not None:
        table = _of_rows("block_table", cache.block_table, B, k, dims=2)
    elif cache.batch_index is not None:
        table = _of_rows("cache_batch_idx", cache.batch_index, B, k)[:, None]
    if cache.leftpad is not None:
        starts = _of_rows("cache_leftpad", cache.leftpad, B, k)
    room = k.shape[2] * (1 if table is None else table.shape[1])
    seqlens = room if cache.seqlens is None else checks.as_python(cache.seqlens)
    if isinstance(seqlens, int):
        longest = seqlens
    else:
        seqlens = _of_rows("cache_seqlens", seqlens, B, k)
        longest = int(seqlens.max()) if tracing.host_knows(seqlens) and B else 0
    if longest + new > room:
        of = "k_cache" if cache.block_table is None else "block_table"
        raise RuntimeError(
            f"cache_seqlens={longest} and {new} new tokens exceed {room} places of {of}"
        )
    if isinstance(seqlens, int):
        seqlens = k.new_full((B,), seqlens, dtype=torch.int32)
    view = view_of_tensors(k, v, seqlens, block_table=table, starts=starts)
    rows = "cache_batch_idx" if cache.block_table is None else "block_table"
    check_view_values(view, new, {"lengths": "cache_seqlens", "block_table": rows})
    return view


def _of_rows(name: str, x: Any, B: int, like: Tensor, dims: int = 1) -> Tensor:
    """Convert x to int32 [B], or [B, N] with dims=2, on the cache's device."""
    places = "B" if dims == 1 else "B N"
    positions: Tensor = checks.check_input(name, x, "integer", places, like, {"B": B})
    return positions.clamp(-checks.FARTHEST, checks.FARTHEST).to(torch.int32)


def _rotated(
    q: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], style: Any, *, moving: bool
) -> Tensor:
    """Rotate q to positions from its row's length on, or all to that position."""
    steps = torch.arange(q.shape[2], device=q.device) * int(moving)
    cos, sin = table_rows(*tables, lengths.unsqueeze(1) + steps)
    return apply_rotary(q, cos, sin, style=style)
