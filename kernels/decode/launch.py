"""Launches of decoding: a tile and a split for the call, and the merging of its parts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..combine import PART_FACTS, combine_launch
from ..launch.arguments import (
    block_dim,
    blocks,
    dot_precision,
    empty_in_layout,
    kernel_score,
    mask_by_blocks,
    shown_by_ranges,
    strided,
)
from ..launch.arrivals import arrival_counters
from ..launch.decode_splits import (
    KeySplit,
    PackedSplit,
    decode_tile,
    in_one_page,
    load_bytes,
    merges_alone,
    nvidia_capability,
    row_alignment,
    split_keys,
)
from ..launch.launches import Launch, cached, signature
from ..launch.tiles import TileConfig
from ..rules.integers import runtime_int
from ..rules.pages import CacheTensors, groups_of, pages_of, stored
from ..rules.splits import Lengths, Plan
from .kernel import DecodeConstants, decode_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...options import Options


def launch_decode(
    q: Tensor,
    cache: CacheTensors,
    starts: Tensor | None,
    new_lengths: Tensor | None,
    options: Options,
    *,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v'] in q's dtype and memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], last dim contiguous. Token i of batch row b has position lengths[row] -
    new_lengths[b] + i in its row of the cache. D_v' is D_v rounded up to whole 16 bytes; columns
    past D_v are undefined.

    Args:
        starts: int [rows]: earlier positions are padding; None: no padding.
        new_lengths: int [B], clamped to [0, T_q]: later queries are padding; None: no padding.
        options: masks and scores; fields for positions and lengths are ignored.
        splits: parts of the keys of every row; None: chosen for the device.
    """
    launch = prepare_decode(q, cache, starts, new_lengths, options, splits=splits)
    return launch(q, cache, starts, new_lengths, options)


class PreparedDecode(NamedTuple):
    """The launches of a decode call, and the shapes of their results.

    parts: shape of the parts' results, which `combine` merges; None: keys are not split. alone: one
    launch in place of both, if the device may take it.
    """

    launch: Launch | None
    combine: Launch | None
    alone: Launch | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[int, ...] | None

    def __call__(
        self,
        q: Tensor,
        cache: CacheTensors,
        starts: Tensor | None,
        new_lengths: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Run `launch_decode` with the cached launches."""
        o = torch.empty_strided(self.shape, self.strides, dtype=q.dtype, device=q.device)
        lse = q.new_empty(self.shape[:3], dtype=torch.float32)
        if self.launch is None:
            return o, lse
        cache = as_bytes(cache)
        if self.combine is None or self.parts is None:
            self.launch((q, o, lse, None, None, starts, new_lengths, *cache, *options))
            return o, lse
        parts = q.new_empty(self.parts, dtype=torch.float32)
        counters = None if self.alone is None else arrival_counters(q.device, self.alone.programs)
        if counters is not None and self.alone is not None:
            self.alone((q, o, lse, parts, counters, starts, new_lengths, *cache, *options))
            return o, lse
        self.launch((q, None, None, parts, None, starts, new_lengths, *cache, *options))
        self.combine((), parts, o, lse)
        return o, lse


def prepare_decode(
    q: Tensor, cache: CacheTensors, starts: Tensor | None, new_lengths: Tensor | None,
    options: Options, *, splits: int | None = None,
) -> PreparedDecode:  # fmt: skip
    """Prepare `launch_decode` for calls with the signature of this one.

    With users' functions it serves only this call. It also depends on `device_key`, and uses the
    current device.
    """
    cache = as_bytes(cache)
    B, H_q, T_q, _ = q.shape
    D_v = cache.v.shape[3]
    elements = 16 // q.element_size()
    o = empty_in_layout(q, H_q, T_q, -(-D_v // elements) * elements)
    if B * H_q * T_q == 0:
        return PreparedDecode(None, None, None, o.shape, o.stride(), None)
    tile = decode_tile(q, cache, options)
    split = split_keys(q, cache, options, tile, splits)
    lse = o.new_empty(B, H_q, T_q, dtype=torch.float32)
    rest = (starts, new_lengths, *cache, *options)
    parts, combine, alone = None, None, None
    if split.plan is None:
        launch = kernel_launch((q, o, lse, None, None, *rest), options, tile, split)
    else:
        parts = (split.parts, H_q, T_q, o.shape[3] + PART_FACTS.value)
        of_parts = q.new_empty(parts, dtype=torch.float32)
        launch = kernel_launch((q, None, None, of_parts, None, *rest), options, tile, split)
        combine = combine_launch(of_parts, o, D_v)
        if merges_alone(B, T_q * H_q // cache.k.shape[1], cache, tile, split):
            counters = q.new_empty(4, dtype=torch.int32)
            alone = kernel_launch((q, o, lse, of_parts, counters, *rest), options, tile, split)
    return PreparedDecode(launch, combine, alone, o.shape, o.stride(), parts)


def kernel_launch(
    arguments: Sequence[Any],
    options: Options,
    tile: TileConfig,
    split: KeySplit,
    packed: PackedSplit | None = None,
) -> Launch:
    """The cached launch of `decode_kernel`.

    arguments: (q, o, lse, parts, counters, starts, counts, *cache, *options).
    parts: for results of parts of the keys; None: keys are not split. counters: see
    `arrival_counters`; None: another launch merges. counts: new_lengths, or the offsets of packed
    queries; `packed` selects their rows.
    """
    key = None
    if not options.launched_anew:
        key = (_plan, signature(arguments), split, None if packed is None else packed[2:])
    plan = partial(_plan, type(options), tile, split, packed)
    return cached(key, arguments, plan, arguments[0].dtype)


def _plan(
    kind: type[Options],
    tile: TileConfig,
    split: KeySplit,
    packed: PackedSplit | None,
    arguments: list[Any],
) -> Launch:
    q, o, lse, parts, counters, starts, counts, *rest = arguments
    fields = len(CacheTensors._fields)
    cache, options = CacheTensors._make(rest[:fields]), kind._make(rest[fields:])
    B, H_q, T_q, D = q.shape
    H_k, D_v = cache.k.shape[1], cache.v.shape[3]
    # Each page of a dense cache is a row.
    rows_kept = (cache.k if cache.lengths is None else cache.lengths).shape[0]
    given = (cache.lengths, None if packed else counts, starts, cache.batch_index)
    lengths = Lengths(*given, runtime_int(rows_kept), runtime_int(split.capacity))
    mask, plan = mask_by_blocks(options), Plan(*map(runtime_int, split.plan or (0, 1)))
    tiles_of_rows = blocks(T_q * H_q // H_k, tile.BLOCK_M)
    if packed is not None:
        lengths = lengths._replace(
            cu_ptr=counts, fewest=runtime_int(packed.fewest), most=runtime_int(packed.most)
        )
        plan = plan._replace(places=runtime_int(packed.places))
        B, tiles_of_rows = counts.shape[0] - 1, 1
        if options.tree_mask is not None and options.tree_starts is None:
            mask = mask._replace(tree_starts_ptr=counts)
    # Without a cache, keys may have either memory order; one kernel serves both.
    in_order = cache.lengths is not None and not cache.shared
    # Each product with codes takes half of the columns.
    groups = groups_of(cache)
    of_tiles = ((cache.k.shape[3], cache.k_scale), (D_v // groups, cache.v_scale))
    BLOCK_D, BLOCK_DV = (
        max(16 if scale is None else 32, block_dim(width)) for width, scale in of_tiles
    )
    int8 = cache.v.dtype == torch.int8
    const = DecodeConstants(
        D=D,
        D_V=D_v,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        BLOCK_D=BLOCK_D,
        BLOCK_DV=BLOCK_DV,
        Q_ALIGN=row_alignment(q),
        O_ALIGN=row_alignment(q if o is None else o),
        SHARED=cache.shared,
        GROUPS=groups,
        ONE_PAGE=in_one_page(cache, tile.BLOCK_N),
        ROW_BYTES=load_bytes(cache),
        RANGES=shown_by_ranges(options),
        PARTS=tile.sum_parts,
        PRECISION=dot_precision(q.dtype),
        NVIDIA=nvidia_capability(),
        INT8=int8,
        # For few rows, scores that start at a number other than 0 take fewer instructions than
        # codes.
        RAISED=int8 and tile.BLOCK_M == 16 and q.dtype != torch.float32,
        MERGED=0 if counters is None else block_dim(D_v),
        PACKED=packed is not None,
    )
    stores = map(stored, cache[:2], cache[2:4], (in_order, in_order))
    rules = (pages_of(cache), lengths, mask, kernel_score(options), plan)
    rows = (strided(q), strided(o), lse, strided(parts), counters)
    sizes = (B, H_q, H_q // H_k, T_q, tiles_of_rows)
    programs = split.parts * H_k * tiles_of_rows
    return Launch(decode_kernel, programs, tile, *rows, *stores, *rules, *sizes, const)


def as_bytes(cache: CacheTensors) -> CacheTensors:
    """The cache with e4m3 codes as bytes: some GPUs lack fp8."""
    if cache.v.dtype != torch.float8_e4m3fn:
        return cache
    k = cache.k if cache.k_scale is None else cache.k.view(torch.uint8)
    return cache._replace(k=k, v=cache.v.view(torch.uint8))
