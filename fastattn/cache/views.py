"""`CacheView`s of caches, and of external tensors."""

from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..cache_view import CacheView
from .checks import check_row_values, check_window
from .dense import KVCache


def view_of_tensors(
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    starts: Tensor | None = None,
    batch_index: Tensor | None = None,
    window: int | None = None,
    keep_first: int = 0,
    length_bound: int | None = None,
    dtype: torch.dtype | None = None,
) -> CacheView:
    """A `CacheView` of external tensors, such as a server's.

    Args:
        k: [P, H_k, S, D], any strides but the last one; k and v may share memory. Row strides that
            are not multiples of 16 bytes are slower.
        v: [P, H_k, S, D_v], likewise.
        lengths: int32 or int64 [rows], contiguous.
        k_scale, v_scale: fp32 for int8 or float8_e4m3fn: [P, H_k, S] per token and head, [H_k] per
            head, or a single one.
        block_table: int32 or int64 [rows, N], contiguous. None: page r is row r.
        starts: int32 or int64 [rows]: earlier positions are padding.
        batch_index: int32 or int64 [B]: the row of each batch element. Values are checked on the
            CPU only.
        window, keep_first: for a ring with such a window.
        length_bound: bound on all lengths; default: the capacity. On a GPU the torch backend needs
            it for a ring.
        dtype: of q, if k and v are codes; default bfloat16.

    Raises:
        TypeError, ValueError: a tensor of the wrong dtype, shape, device or layout.
    """
    k_scale, v_scale = _check_buffers(k, v, k_scale, v_scale)
    sizes: checks.Sizes = {}
    integers = {"lengths": (lengths, "rows"), "block_table": (block_table, "rows N")}
    integers |= {"starts": (starts, "rows"), "batch_index": (batch_index, "B")}
    for name, (x, dims) in integers.items():
        if x is not None or x is lengths:
            checks.check_input(name, x, "integer", dims, k, sizes)
    rows, S = lengths.shape[0], k.shape[2]
    if block_table is None and k.shape[0] < rows:
        raise ValueError(f"k must have a page for each of {rows} rows, got {k.shape[0]}")
    if batch_index is not None:
        check_row_values("batch_index", batch_index, rows)
    if window is not None and (block_table is not None or starts is not None):
        raise ValueError("window: a ring has neither a block_table nor starts")
    window, keep_first = check_window(window, keep_first, S, "slots of k")
    if length_bound is not None:
        length_bound = checks.check_count("length_bound", length_bound, 0)
    if dtype is not None:
        checks.check_float_dtype("dtype", dtype)
    capacity = S if block_table is None else S * block_table.shape[1]
    stored = torch.bfloat16 if k_scale is not None else k.dtype
    return CacheView(
        k, v, k_scale, v_scale,
        None if block_table is None else block_table.contiguous(),
        S, lengths.contiguous(), None if starts is None else starts.contiguous(),
        batch_index, capacity if length_bound is None else length_bound,
        None if window is None else keep_first, window,
        stored if dtype is None else dtype, torch.zeros_like(lengths, dtype=torch.int32),
    )  # fmt: skip


# Offsets within a block of keys are 32-bit.
_FARTHEST_SLOTS = 2**31 // 512


def _check_buffers(
    k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> list[Tensor | None]:
    """Check buffers; return the scales of k and v as [P, H_k, S]."""
    sizes: checks.Sizes = {}
    scales = []
    for name, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        checks.check_input(name, x, "as k" if x is v else "", f"P H_k S D_{name}", k, sizes)
        if (x.stride(3) != 1 and x.shape[3] > 1) or x.stride(2) >= _FARTHEST_SLOTS:
            raise ValueError(
                f"{name} must have rows whose numbers follow one another, and slots less than "
                f"{_FARTHEST_SLOTS} numbers apart, got strides {x.stride()}"
            )
        codes = x.dtype in (torch.int8, torch.float8_e4m3fn)
        if not codes and x.dtype not in checks.FLOAT_DTYPES:
            raise TypeError(f"{name} must be a float tensor, int8 or float8_e4m3fn, got {x.dtype}")
        if codes != (scale is not None):
            raise ValueError(
                f"{name}_scale is for int8 and float8_e4m3fn only, got it with {x.dtype}"
                if scale is not None
                else f"{name}_scale must be given, as {name} is {x.dtype}"
            )
        scales.append(None if scale is None else _scale_of_slots(f"{name}_scale", scale, x))
    return scales


def _scale_of_slots(name: str, scale: Tensor, x: Tensor) -> Tensor:
    """Expand a scale to [P, H_k, S]."""
    checks.check_input(name, scale, "float32", "...", x, {})
    sizes = dict(zip(("P", "H_k", "S"), x.shape, strict=False))
    if scale.dim() <= 1:
        if scale.numel() != 1:
            checks.check_input(name, scale, "", "H_k", x, sizes)
        return scale.reshape(1, -1, 1).expand(x.shape[:3])
    checks.check_input(name, scale, "", "P H_k S", x, sizes)
    return scale


def view_of_cache(cache: Any, name: str = "cache") -> tuple[CacheView, int | None]:
    """The view of a cache, and its rows' common length if known to the host.

    name: of the argument, for the error where it is none.
    """
    if isinstance(cache, CacheView):
        return cache, None
    # Tensors, arrays and classes also have a `view` attribute.
    view = None if isinstance(cache, (Tensor, type)) else getattr(cache, "view", None)
    of_rows = hasattr(cache, "rows")
    whole = None if view is None else view(cache.rows) if of_rows else view()
    if not isinstance(whole, CacheView):
        raise TypeError(
            f"{name} must be a KVCache, a PagedKVCache or a CacheView, "
            f"got {checks.type_name(cache)}"
        )
    return whole, cache.uniform_length if not of_rows and whole.starts is None else None


def slots_of_tokens(cache: KVCache) -> tuple[Any, Any] | None:
    """End and first of the slots that hold tokens: of all rows, or lists of each row's.

    None: the host does not know, or slot t does not hold token t, as it is.
    """
    if cache.window is not None or cache.quantize is not None:
        return None
    n, starts = cache.uniform_length, cache.starts
    if n is not None and starts is None:
        return n, 0
    if not tracing.host_knows(cache.lengths):
        return None
    ends = cache.lengths.tolist()
    return ends, [0] * len(ends) if starts is None else starts.tolist()


def without_window(view: CacheView, instead: str) -> CacheView:
    """Check that a view is no ring; instead: the alternative, for the message."""
    if view.window is not None:
        raise ValueError(f"cache must keep all tokens of its rows, got a ring: {instead}")
    return view


def view_of_step(cache: Any) -> CacheView:
    """The view of `attention_paged`'s cache argument, which may be no ring."""
    if isinstance(cache, tuple) and not isinstance(cache, CacheView):
        if len(cache) != 4:
            raise TypeError(
                "cache must be (k_pages, v_pages, block_table, lengths) where it is a tuple, "
                f"got one of {len(cache)}"
            )
        k, v, table, lengths = cache
        view = view_of_tensors(k, v, lengths, block_table=table)
    else:
        view, _ = view_of_cache(cache)
    return without_window(view, "decode_attention reads one")
