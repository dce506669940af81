"""Check decoding from every kind of cache against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..cache.dense import KVCache
from ..cache.paged import PagedKVCache
from ..cache_view import CacheView
from ..functional.decode import decode_attention
from ..quantization import quantize_rows
from .compare import assert_all_near
from .orders import RUNS

# Kinds of caches: constructor arguments, starts and indexing of rows.
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "left-padded": {"starts": (2, 0, 1)},
    "some-rows": {"batch_index": (3, 0, 2)},
    "pages-of-1": {"page_size": 1},
    "pages-of-3": {"page_size": 3},
    "pages-of-16": {"page_size": 16},
    "int8": {"quantize": "int8"},
    "fp8": {"quantize": "fp8"},
    "pages-int8": {"page_size": 5, "quantize": "int8"},
    "ring": {"window": 9},
    "ring-keep-first": {"window": 7, "keep_first": 2},
    "ring-int8": {"window": 9, "quantize": "int8"},
}


@dataclass(frozen=True)
class Filled:
    """Cache of B rows, and its tokens for the oracle.

    view: the rows in order. k, v: [B, H_k, T, D] by position, dequantised. masks: options of
    `reference.attention`, besides the lengths.
    """

    view: CacheView
    k: Tensor
    v: Tensor
    lengths: Tensor
    masks: dict[str, Any]


def fill(kind: str, k: Tensor, v: Tensor, lengths: Tensor) -> Filled:
    """Fill a cache, one of KINDS, with lengths[b] tokens of k, v [B, H_k, T, D] in row b."""
    options = dict(KINDS[kind])
    starts, index = options.pop("starts", None), options.pop("batch_index", None)
    page_size = options.pop("page_size", None)
    B, H_k, T, D = k.shape
    sizes: dict[str, Any] = {"value_dim": v.shape[3], "dtype": k.dtype, "device": k.device}
    masks: dict[str, Any] = {}
    if page_size is not None:
        paged = PagedKVCache(2 * B * T // page_size + B, page_size, H_k, D, **sizes, **options)
        rows = [paged.allocate() for _ in range(B)]
        # Rows alternate page by page, so that a row's pages are apart in the pool.
        for first in range(0, T, page_size):
            counts = (lengths - first).clamp(0, page_size).tolist()
            part = slice(first, first + page_size)
            paged.append(rows, k[:, :, part], v[:, :, part], counts, backend="torch")
        view = paged.view(rows)
    else:
        window = options.get("window")
        slots = T + 3 if window is None else window + options.get("keep_first", 0) + 2
        cache = KVCache(B if index is None else 4, H_k, slots, D, **sizes, **options)
        on_device = None if index is None else torch.tensor(index[:B], device=k.device)
        cache.append(k, v, lengths, batch_index=on_device, backend="torch")
        if starts is not None:
            begin = torch.tensor(starts[:B], device=k.device)
            cache.set_starts(begin)
            masks["key_padding_mask"] = torch.arange(T, device=k.device) >= begin[:, None]
        if window is not None:
            masks.update(window=(window - 1, None), keep_first=options.get("keep_first", 0))
        view = cache.view(on_device)
    if view.k_scale is not None:
        both = (quantize_rows(x, options["quantize"]) for x in (k, v))
        k, v = (codes.float() * scale[..., None] for codes, scale in both)
    return Filled(view, k, v, lengths, masks)


def assert_decodes(
    q: Tensor,
    filled: Filled,
    *,
    decode: Callable[..., Any] = decode_attention,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """Check decode(q, view, **how, **options) by the error budget; the worst share of it."""
    actual = decode(q, filled.view, return_lse=True, **(how or {}), **options)
    return assert_decoded(actual, q, filled, **options)


def assert_decoded(
    actual: Sequence[Tensor],
    q: Tensor,
    filled: Filled,
    *,
    counts: Tensor | None = None,
    orders: int = RUNS,
    **options: Any,
) -> float:
    """Check o and lse of the newest tokens, of which row b has counts[b], or all of q."""
    T_k = filled.k.shape[2]
    counts = torch.full_like(filled.lengths, q.shape[2]) if counts is None else counts
    offset = filled.lengths - counts
    arguments: dict[str, Any] = {"causal": True, "key_lengths": filled.lengths}
    arguments |= {"query_offset": offset, **filled.masks, **options}
    # A mask may have room for more keys.
    wide = (name for name in ("attn_mask", "attn_bias") if name in arguments)
    arguments |= {name: arguments[name][..., :T_k] for name in wide}

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tensors = (x.to(dtype) for x in (q, filled.k, filled.v))
        return reference.attention(*tensors, return_lse=True, **arguments)

    exact = run(torch.float64)
    assert actual[0].isfinite().all(), "unspecified results must be finite"
    real = (torch.arange(q.shape[2], device=q.device) < counts[:, None])[:, None]
    known = [
        torch.where(real[..., None] if x.dim() == 4 else real, x, like.to(x.dtype))
        for x, like in zip(actual, exact, strict=True)
    ]
    return assert_all_near(("o", "lse"), known, exact, lambda: run(q.dtype), orders)


def assert_paged(
    actual: Sequence[Tensor],
    q: Tensor,
    filled: Filled,
    offsets: Tensor,
    orders: int = RUNS,
    **options: Any,
) -> float:
    """Check o and lse of packed tokens q [total, H_q, D] by the error budget."""

    oracle: Callable[..., Any] = reference.attention_paged

    def run(dtype: torch.dtype) -> Any:
        q_k_v = (x.to(dtype) for x in (q, filled.k, filled.v))
        return oracle(*q_k_v, filled.lengths, offsets, return_lse=True, **options)

    return assert_all_near(("o", "lse"), actual, run(torch.float64), lambda: run(q.dtype), orders)
