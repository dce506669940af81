"""Argument checks of the caches."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import checks, tracing
from ..cache_view import CacheView
from ..rotary import check_rotary_style

Rotary = tuple[Tensor, Tensor]


def check_sizes(**sizes: Any) -> list[int]:
    """Check sizes from 1 to 2^31 - 1, and return them as Python ints."""
    counts = {name: checks.check_count(name, size, 1) for name, size in sizes.items()}
    for name, size in counts.items():
        if size >= 2**31:
            raise ValueError(f"{name} must be below 2**31, got {size}")
    return [*counts.values()]


def check_ints(name: str, each: str, numbers: Any) -> list[int]:
    """Check for ints in a list, a tuple or a CPU tensor; returns Python ints. each: name of one."""
    if not isinstance(numbers, Iterable) or (isinstance(numbers, Tensor) and not numbers.dim()):
        raise TypeError(f"{name} must be a sequence of ints, got {checks.got(numbers)}")
    return [checks.check_int(each, n) for n in numbers]


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """A cache's floating dtype; default torch's."""
    return checks.check_float_dtype("dtype", torch.get_default_dtype() if dtype is None else dtype)


def check_row_values(name: str, x: Tensor, rows: int, *, distinct: bool = False) -> None:
    """Check row numbers, 0 to rows - 1, if on the CPU.

    distinct: without repeats.
    """
    if not tracing.host_knows(x) or not x.numel():
        return
    low, high = (int(n) for n in torch.aminmax(x))
    if low < 0 or high >= rows:
        raise ValueError(f"{name} must hold rows from 0 to {rows - 1}, got {low} to {high}")
    if distinct and len(set(x.tolist())) < x.numel():
        raise ValueError(f"{name} must hold no row twice, got {x.tolist()}")


def check_view_values(
    view: CacheView, new: int = 0, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check lengths, and pages of tokens and of `new` ones, if on the CPU.

    names: of fields, as the caller knows them.
    """
    columns = 1 if view.block_table is None else view.block_table.shape[1]
    room, lengths = columns * view.page_size, view.lengths
    if not tracing.host_knows(lengths) or not lengths.numel() or view.window is not None:
        return
    lengths = view.of_batch(lengths)
    wrong = ((lengths < 0) | (lengths > room)).nonzero()
    if wrong.numel():
        b = int(wrong[0])
        raise ValueError(
            f"{names.get('lengths', 'lengths')} must be from 0 to {room}, the slots of a row's "
            f"{columns} pages, got {int(lengths[b])} for row {b}"
        )
    if lengths.numel() and (longest := int(lengths.max())) > view.length_bound:
        raise ValueError(
            f"length_bound must be at least the {longest} tokens of the longest row, got "
            f"{view.length_bound}"
        )
    if view.block_table is None:
        return
    table, P = view.of_batch(view.block_table), view.k.shape[0]
    used = torch.arange(columns, device=table.device) * view.page_size < lengths[:, None] + new
    wrong = (used & ((table < 0) | (table >= P))).nonzero()
    if wrong.numel():
        b, column = wrong[0].tolist()
        raise ValueError(
            f"{names.get('block_table', 'block_table')} must hold numbers of pages from 0 to "
            f"{P - 1}, got {int(table[b, column])} for page {column} of row {b}"
        )


def check_window(window: Any, keep_first: Any, room: int, name: str) -> tuple[int | None, int]:
    """Check that a ring has room for its window and first positions; return both as Python ints.

    name: of the room.
    """
    keep_first = checks.check_keep_first(keep_first, window is not None)
    if window is None:
        return None, keep_first
    window = checks.check_count("window", window, 1)
    if keep_first + window > room:
        raise ValueError(
            f"{name} must be at least keep_first + window = {keep_first + window}, got {room}"
        )
    return window, keep_first


def check_tokens(
    k: Tensor, v: Tensor, like_k: Tensor, like_v: Tensor, batch: int, dtype: torch.dtype,
    head_dim: int | None = None,
) -> None:  # fmt: skip
    """Check that k [B, H_k, T, D] and v [B, H_k, T, D_v] fit buffers [*, H_k, *, D] and [*, H_k, *,
    D_v].

    head_dim: D, where like_k has a part of the columns.

    Raises:
        ValueError: a shape, the dtype or the device disagrees.
        RuntimeError: one requires grad while grad mode is on.
    """
    sizes = {"B": batch, "H_k": like_k.shape[-3], "D_v": like_v.shape[-1]}
    sizes["D"] = like_k.shape[-1] if head_dim is None else head_dim
    for name, x, dims in (("k", k, "B H_k T D"), ("v", v, "B H_k T D_v")):
        checks.check_input(name, x, "", dims, like_k, sizes)
        if x.dtype != dtype:
            raise ValueError(
                f"{name} must have the cache's dtype {dtype}, got {x.dtype}; "
                "build the cache with the dtype that attention runs in"
            )
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "KVCache stores no graph, but k or v requires grad: append under torch.no_grad() "
            "or torch.inference_mode(), or detach them"
        )


def check_rotary(
    rotary: Rotary | None, style: str, q: Tensor | None, k: Tensor, bound: int
) -> None:
    """Check tables [N, R // 2] for positions 0..bound-1, and q [B, H_q, T, D] that matches k.

    Raises:
        TypeError: rotary is no pair of tensors, or q no tensor.
        ValueError: a shape, dtype or device disagrees, the tables are too short, the style is
            unknown, or q is given without tables.
    """
    check_rotary_style(style)
    if rotary is None:
        if q is not None:
            raise ValueError("q needs rotary=(cos, sin), as it is only rotated")
        return
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise TypeError(f"rotary must be (cos, sin), got {checks.type_name(rotary)}")
    cos, sin = rotary
    sizes: checks.Sizes = {}
    for name, x in (("cos", cos), ("sin", sin)):
        checks.check_input(f"rotary {name}", x, "float32", "N R//2", k, sizes)
    if not 0 < 2 * sizes["R//2"] <= k.shape[3]:
        raise ValueError(f"rotary must rotate up to {k.shape[3]} columns, got {2 * sizes['R//2']}")
    needed = max(bound, 1)
    if needed > cos.shape[0]:
        raise ValueError(
            f"rotary tables must have a row for every position: {needed} are needed, "
            f"got {cos.shape[0]}"
        )
    if q is None:
        return
    sizes = dict(zip(("B", "H_k", "T", "D"), k.shape, strict=True))
    checks.check_input("q", q, "as k", "B H_q T D", k, sizes)
