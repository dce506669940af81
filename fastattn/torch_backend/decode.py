"""Decoding in plain torch: gather a cache's tokens in order, then call torch's attention."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Imported by name, so that it stays torch's own if torch's module is patched.
from torch.nn.functional import scaled_dot_product_attention

from .. import tracing
from ..cache_view import CacheView, as_bytes
from ..options import Options
from ..quantization import dequantize_rows
from . import cpu_kernel
from . import torch_attention as torch_backend


@tracing.without_autocast
def attend(
    q: Tensor,
    view: CacheView,
    new_lengths: Tensor | None,
    options: Options,
    uniform: int | None,
    *,
    return_lse: bool,
    first_row: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """o, or (o, lse); uniform: length of all rows, if known to the host and without padding.

    first_row: b of the first batch row. A cache with pages, codes or a batch index is copied for
    the call.
    """
    T_q = q.shape[2]
    counts = T_q if new_lengths is None else new_lengths.clamp(0, T_q)
    newest = None
    if view.window is None and tracing.host_knows(q) and by_rows(q, view.length_bound):
        newest = over_slots(q, options, return_lse)
    if view.window is None:
        k, v, options = in_order(view, options, counts, uniform)
    else:
        k, v, options = _of_ring(view, options, counts, T_q)
    if newest is None or options.key_lengths is None:
        return torch_backend.attention(q, k, v, options, return_lse, first_row)
    ends = options.key_lengths.tolist()
    starts = [0] * len(ends) if view.starts is None else view.of_batch(view.starts).tolist()
    return newest(q, k, v, ends, starts)


def by_rows(q: Tensor, bound: int) -> bool:
    """Whether a call per row, of up to `bound` keys, is faster on a CPU than one with a mask."""
    # A row has work for every thread, and rows are few or long.
    few = q.shape[0] <= 16 or bound >= 64
    return q.shape[0] > 0 and torch.get_num_threads() <= q.shape[1] and few


# q, keys and values by slot, the end of the slots of tokens, and the first: one, or one a row.
OverSlots: TypeAlias = Callable[..., Tensor]


def over_slots(q: Tensor, options: Options, return_lse: bool) -> OverSlots | None:
    """The function of one query a row, the last, that sees all slots of tokens or the newest.

    It holds whatever the number of slots is. None: the call is another, see `attend`.
    """
    band = options.band
    if q.shape[2] != 1 or return_lse or band is None or not options.plain:
        return None
    if options.weighs or options.batch_invariant:
        return None
    return partial(_over_slots, left=band[0], scale=options.scale)


def _over_slots(
    q: Tensor, k: Tensor, v: Tensor, end: Any, first: Any, *, left: int | None, scale: float
) -> Tensor:
    if type(end) is list:
        rows = zip(*(torch.split(x, 1) for x in (q, k, v)), end, first, strict=True)
        return torch.cat([_over_slots(*row, left=left, scale=scale) for row in rows])
    if left is not None and end - left > first + 1:
        first = end - 1 - left
    if first > 0:
        k, v = k[:, :, first:], v[:, :, first:]
        end -= first
    B, H_q, _, D = q.shape
    H_k, T = k.shape[1], max(0, min(end, k.shape[2]))
    # Faster than slices.
    k = k.as_strided((B, H_k, T, D), k.stride())
    v = v.as_strided((B, H_k, T, v.shape[3]), v.stride())
    if T > 0:
        # Query heads of one key head as its queries: torch would copy keys for each.
        queries = q if H_q == H_k else q.reshape(B, H_k, H_q // H_k, D)
        if cpu_kernel.in_fp32(queries, k):
            inputs = queries.float(), k.float(), v.float()
            o = scaled_dot_product_attention(*inputs, scale=scale).to(q.dtype)
        else:
            o = scaled_dot_product_attention(queries, k, v, scale=scale)
        o = o if H_q == H_k else o.reshape(B, H_q, 1, -1)
        if T >= cpu_kernel.VECTOR or cpu_kernel.fills_rows(o):
            return o
    exact: Any = torch_backend.attention(q, k, v, Options(scale=scale))
    return exact


def in_order(
    view: CacheView, options: Options, counts: int | Tensor, uniform: int | None
) -> tuple[Tensor, Tensor, Options]:
    """Keys and values by position, of what is no ring, and options of `attention` for them.

    counts: number of queries of each row that are tokens.
    """
    n = view.length_bound
    if view.block_table is None:
        n = min(n, view.page_size)
    options = _over_keys(options, n)
    k, v = _slots(view, n)
    if uniform is not None and isinstance(counts, int) and view.starts is None:
        return k, v, options._replace(query_offset=uniform - counts)
    lengths = view.of_batch(view.lengths)
    options = options._replace(key_lengths=lengths, query_offsets=lengths - counts)
    if view.starts is not None:
        positions = torch.arange(n, device=lengths.device)
        exists = positions >= view.of_batch(view.starts).unsqueeze(1)
        options = options._replace(key_padding_mask=exists)
    return k, v, options


def _slots(view: CacheView, n: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first n slots: views of the cache, or copies of pages and codes."""
    plain = view.block_table is None and view.k_scale is None and view.batch_index is None
    k, v = (view.k, view.v) if plain else view.gather_slots()
    return k[: view.batch_size, :, :n], v[: view.batch_size, :, :n]


def _of_ring(
    view: CacheView, options: Options, counts: int | Tensor, T_q: int
) -> tuple[Tensor, Tensor, Options]:
    """Keys and values of a ring by slot, and options of `attention` with their positions.

    Copied by position, with those that it has lost masked, for tensors with a column a position.
    """
    lengths = view.of_batch(view.lengths)
    by_position = options.batch_invariant or options.attn_mask is not None
    if not by_position and options.attn_bias is None:
        held, steps = view.slot_positions(), torch.arange(T_q, device=lengths.device)
        options = options._replace(
            q_positions=((lengths - counts)[:, None] + steps).to(torch.int32),
            k_positions=held.clamp(min=0),
            key_padding_mask=held >= 0,
        )
        return *_slots(view, view.page_size), options
    first, S, n = view.keep_first, view.page_size, view.length_bound
    assert first is not None
    if tracing.host_knows(lengths) and lengths.numel():
        n = int(lengths.max())
    positions = torch.arange(n, device=lengths.device).expand(view.batch_size, n)
    lasting = (positions < first) | (positions >= lengths[:, None] - (S - first))
    page, slot = view.locate(positions)
    options = _over_keys(options, n)._replace(
        key_padding_mask=lasting, key_lengths=lengths, query_offsets=lengths - counts
    )
    k = _rows_at(view.k, view.k_scale, page, slot, view.dtype)
    v = _rows_at(view.v, view.v_scale, page, slot, view.dtype)
    return k, v, options


def _rows_at(
    stored: Tensor, scale: Tensor | None, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> Tensor:
    """[B, H_k, N, width] at page, slot [B, N], dequantised."""
    rows = as_bytes(stored)[page, :, slot]
    if scale is not None:
        rows = dequantize_rows(rows.view(stored.dtype), scale[page, :, slot], dtype)
    return rows.transpose(1, 2)


def _over_keys(options: Options, n: int) -> Options:
    """Options with mask and bias cut to n columns."""
    mask, bias = options.attn_mask, options.attn_bias
    return options._replace(
        attn_mask=None if mask is None else mask[..., :n],
        attn_bias=None if bias is None else bias[..., :n],
    )
