"""flash-attn's caches as caches of ours: the same memory, seen as pages of one token.

flash-attn keeps [B, S, H_k, D] (or pages of that form), where our kernels read pages of
[H_k, page_size, D]. With page_size = 1 both are the same bytes: token s of row b is page b * S + s.
A table of those numbers also says where a row starts, and which row of the cache it is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import cache_ops
from ..decode import decode_attention, view_of_tensors
from ..positions import document_ids
from ..rotary import apply_rotary

# Its overloads want return_lse as a literal.
_decode: Any = decode_attention


class Cache(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` that say where tokens are; see there."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None
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
) -> Any:
    """o [B, H_q, T_q, D_v], or (o, lse), after writing k and v into the cache."""
    _check_together(cache, new, rotary)
    k, v = (None if x is None else x.transpose(1, 2) for x in new)
    q = q.transpose(1, 2)
    B = q.shape[0]
    with torch.no_grad():
        table, lengths = _token_table(cache, B, 0 if k is None else k.shape[2])
        old = lengths.clone()
        view = view_of_tensors(_tokens(cache.k), _tokens(cache.v), lengths, block_table=table)
        cos, sin = rotary
        style: Any = "interleaved" if interleaved else "half"
        tables = None if cos is None or sin is None else (cos.float(), sin.float())
        if tables is not None:
            q = _rotated(q, old, tables, style, moving=options["causal"] or "window" in options)
        if k is not None and v is not None:
            cache_ops.append(view, k, v, rotary=tables, rotary_style=style)
        return _decode(q, view, num_splits=num_splits, return_lse=return_lse, **options)


def attend_packed(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    lengths: Tensor,
    block_table: Tensor,
    options: dict[str, Any],
    return_lse: bool,
) -> Any:
    """o [total_q, H_q, D_v], or (o, lse [H_q, total_q]), of packed queries over pages."""
    if options.pop("dropout", None):
        raise RuntimeError("dropout_p must be 0.0 with a block_table")
    N = cu_seqlens_q.shape[0] - 1
    with torch.no_grad():
        cache = Cache(k_pages, v_pages, lengths, None, None, block_table)
        table, lengths = _token_table(cache, N, 0)
        view = view_of_tensors(_tokens(k_pages), _tokens(v_pages), lengths, block_table=table)
        row = document_ids(cu_seqlens_q, q.shape[0])[0].long()
        place = torch.arange(q.shape[0], device=q.device) - cu_seqlens_q[row]
        padded = q.new_zeros(N, max_seqlen_q, *q.shape[1:])
        padded[row, place] = q
        found = _decode(
            padded.transpose(1, 2), view, new_lengths=cu_seqlens_q.diff(), return_lse=return_lse,
            **options,
        )  # fmt: skip
        if not return_lse:
            return found[row, :, place]
        o, lse = found
        return o[row, :, place], lse[row, :, place].transpose(0, 1)


def _check_together(
    cache: Cache,
    new: tuple[Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None],
) -> None:
    """RuntimeError for arguments that flash-attn refuses in these combinations."""
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
        if not x.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {x.stride()}")


def _tokens(cache: Tensor) -> Tensor:
    """[B, S, H_k, D] as pages [B * S, H_k, 1, D] of the same memory."""
    return cache.view(-1, cache.shape[2], 1, cache.shape[3])


def _token_table(cache: Cache, B: int, new: int) -> tuple[Tensor, Tensor]:
    """int32 [B, N], the number of every token of a row, and int32 [B], how many there are.

    The lengths are a tensor of its own, to be counted up. Rows have to have room for `new` tokens.
    """
    S, device = cache.k.shape[1], cache.k.device
    slots = torch.arange(S, device=device, dtype=torch.int32)
    if cache.block_table is not None:
        pages = cache.block_table.to(torch.int32)
        table = (pages.unsqueeze(2) * S + slots).flatten(1)
    else:
        rows = cache.batch_index
        if rows is None:
            rows = torch.arange(B, device=device)
        table = rows.to(torch.int32).unsqueeze(1) * S + slots
    room = table.shape[1]
    seqlens = room if cache.seqlens is None else cache.seqlens
    if isinstance(seqlens, int):
        if seqlens + new > room:
            raise RuntimeError(f"cache_seqlens={seqlens} and {new} new tokens exceed {room} places")
        lengths = torch.full((B,), seqlens, dtype=torch.int32, device=device)
    else:
        lengths = seqlens.to(torch.int32, copy=True)
    if cache.leftpad is not None:
        first = cache.leftpad.to(torch.int32)
        shifted = (slots + first.unsqueeze(1)).clamp(max=S - 1)
        table, lengths = table.gather(1, shifted.long()), lengths - first
    return table.contiguous(), lengths


def _rotated(
    q: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], style: Any, *, moving: bool
) -> Tensor:
    """q rotated to positions from its row's length on, or all of it to that one."""
    steps = torch.arange(q.shape[2], device=q.device) * int(moving)
    positions = (lengths.unsqueeze(1) + steps).clamp(max=tables[0].shape[0] - 1).long()
    return apply_rotary(q, tables[0][positions], tables[1][positions], style=style)
