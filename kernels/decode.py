"""Decoding: a few new queries a row against a long cache, the keys split among programs.

The G query heads of a K/V head, times the new tokens, are the rows of one tile, so that keys and
values are read once for all of them. Row r of the tiles of a K/V head is token r // G of its query
head r % G. With G = 3 heads (a, b, c) and two new tokens, a tile of 16 rows holds

    a0 b0 c0 a1 b1 c1 . . . . . . . . . .

Each part of the keys writes its own (o, lse), which `combine` merges; where keys are not split the
kernel writes the result. How many parts there may be is known when the grid is launched, which row
and keys each takes only when it runs: a launch recorded in a CUDA graph serves lengths that grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from .combine import EARLY_FROM, PART_FACTS, combine_launch
from .launch.arguments import (
    block_dim,
    blocks,
    dot_precision,
    empty_in_layout,
    kernel_score,
    mask_by_blocks,
    shown_by_ranges,
)
from .launch.decode_splits import (
    Split,
    decode_tile,
    in_one_page,
    load_bytes,
    nvidia_capability,
    row_alignment,
    split_keys,
)
from .launch.launches import Launch, cached, signature
from .launch.tiles import TileConfig
from .rules.codes import (
    add_weighted_codes,
    far_behind,
    lift_of,
    queries_for_codes,
    scores_of_codes,
)
from .rules.integers import runtime_int, value
from .rules.mask import valid_keys, visible
from .rules.pages import (
    CacheTensors,
    load_scales,
    load_slots,
    locate,
    pages_of,
    stored,
)
from .rules.product import add_weighted_rows, interleave, rows_by_rows
from .rules.score import first_state, modified
from .rules.softmax import finish, in_parts, online_step
from .rules.splits import Lengths, Plan, cache_row_of, part_of, share
from .rules.tile import load_at

if TYPE_CHECKING:
    from fastattn.options import Options


class _Rows(NamedTuple):
    """[B, H, T, width] in memory; strides in the form of `runtime_int`."""

    ptr: Any
    stride_b: int | None
    stride_h: int | None
    stride_t: int | None


@triton.jit
def _pointers(x, b, h, t, ALIGN: tl.constexpr):
    """Pointers [M] to the rows of heads h at tokens t; ALIGN elements are a launcher's promise."""
    stride_b = tl.multiple_of((x.stride_b >> 2).to(tl.int64), ALIGN)
    stride_h = tl.multiple_of((x.stride_h >> 2).to(tl.int64), ALIGN)
    stride_t = tl.multiple_of((x.stride_t >> 2).to(tl.int64), ALIGN)
    return x.ptr + b * stride_b + h * stride_h + t * stride_t


@triton.jit
def _take_block(
    acc, m, l, q, k_store, v_store, pages, cache_row, h_k, n_first, valid, keep, t, h, row, score,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ONE_PAGE: tl.constexpr, ROW_BYTES: tl.constexpr,
    RAISED: tl.constexpr, PRECISION: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Take one key block into the state of the rows; valid = keep = None for a full block."""
    k_pos = n_first + tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        page, slot = locate(cache_row, n_first, n_first >= 0, pages)
    else:
        page, slot = locate(cache_row, k_pos, k_pos >= 0 if valid is None else valid, pages)
    # No load leaves the pool, whatever the table says.
    page = tl.minimum(tl.maximum(page, 0), value(pages.page_count) - 1)
    k = load_slots(k_store, page, slot, h_k, valid, BLOCK_N, BLOCK_D, D, ONE_PAGE, ROW_BYTES)
    CODES: tl.constexpr = k_store.scale_ptr is not None
    INT8: tl.constexpr = k_store.ptr.dtype.element_ty == tl.int8
    unit = None
    lift = None
    if CODES:
        s = scores_of_codes(q, k, INT8, RAISED, PRECISION, NVIDIA)
        k_scale = load_scales(k_store, page, slot, h_k, pages, valid, BLOCK_N, ONE_PAGE)
        if keep is None:
            unit = q.unit, k_scale[None, :]
        else:  # -inf in hidden places is not to be multiplied
            s = s * (q.unit * k_scale)[None, :]
        v_scale = load_scales(v_store, page, slot, h_k, pages, valid, BLOCK_N, ONE_PAGE)
        lift = lift_of(v_scale)[None, :]
    else:
        s = rows_by_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    s, factor, _, _ = modified(s, t[:, None], k_pos[None, :], h[:, None], row, score, unit=unit)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None or score.hides is not None
    p, rescale, m, l = online_step(s, m, l, factor, MASKED, lift=lift)
    v = load_slots(v_store, page, slot, h_k, valid, BLOCK_N, BLOCK_DV, D_V, ONE_PAGE, ROW_BYTES)
    if CODES:
        acc = (acc[0] * rescale[:, None], acc[1] * rescale[:, None])
        p = p * v_scale[None, :]
        acc = add_weighted_codes(acc, p, v, q.even.dtype, INT8, PRECISION, NVIDIA)
    else:
        acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, m, l


@triton.jit(do_not_specialize=["B", "H_q", "G", "T_q", "tiles"])
def decode_kernel(
    q, o, lse_ptr, k_store, v_store, pages, lengths, mask, score, plan,
    B, H_q, G, T_q, tiles,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_ALIGN: tl.constexpr, ONE_PAGE: tl.constexpr,
    ROW_BYTES: tl.constexpr, RANGES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """One tile of rows against one part of the keys. Programs: parts, of each its K/V heads, of
    each its tiles.

    o and lse are the results. Without lse, o takes the results of parts: see `combine.PART_FACTS`.
    """
    IN_PARTS: tl.constexpr = lse_ptr is None
    tile = tl.program_id(0) % tiles
    h_k = tl.program_id(0) // tiles % (H_q // G)
    part = tl.program_id(0) // (tiles * (H_q // G))
    m_first = tile * BLOCK_M // G
    m_last = (tl.minimum(tile * BLOCK_M + BLOCK_M, T_q * G) - 1) // G
    b = part
    begin = part
    size = 0
    if IN_PARTS:
        b, begin, size = part_of(part, m_first, m_last, B, T_q, lengths, mask, plan, BLOCK_N)
    if b >= B:
        return
    split = part - begin
    cache_row, row = cache_row_of(b, T_q, lengths, mask)

    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = r < T_q * G
    # Rows that do not exist are copies of the last one: what users' functions load for them exists.
    r = tl.minimum(r, T_q * G - 1)
    t = r // G
    h = h_k * G + r % G
    first, last, full_first, full_last, lo, kept, splits = share(
        split, size, m_first, m_last, row, mask, plan, BLOCK_N, RANGES
    )
    O_ALIGN: tl.constexpr = 128 // o.ptr.dtype.element_ty.primitive_bitwidth
    if IN_PARTS:
        facts = _pointers(o, b, h, t, O_ALIGN) + value(o.stride_t) - PART_FACTS
        first_part = in_rows & (split == 0)
        tl.store(facts + 1, tl.cast(begin, tl.float32), mask=first_part)
        tl.store(facts + 2, tl.cast(splits, tl.float32), mask=first_part)
    CODES: tl.constexpr = k_store.scale_ptr is not None
    # The scores of few rows begin with a number other than 0 in fewer instructions than codes take.
    INT8: tl.constexpr = k_store.ptr.dtype.element_ty == tl.int8
    RAISED: tl.constexpr = INT8 and BLOCK_M == 16 and q.ptr.dtype.element_ty != tl.float32
    q_rows = _pointers(q, b, h, t, Q_ALIGN)[:, None]
    if CODES:
        q_tile = queries_for_codes(q_rows, in_rows, BLOCK_D, D, RAISED)
    else:
        q_tile = load_at(q_rows + tl.arange(0, BLOCK_D)[None, :], in_rows, BLOCK_D, D)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # The sink is one key of the row: the first split has it.
    m_sink, l_sink = first_state(h, m, l, score)
    m = tl.where(split == 0, m_sink, m)
    l = tl.where(split == 0, l_sink, l)
    if PARTS > 1:
        l = in_parts(l, PARTS)
    if CODES:
        m, l = far_behind(m, l)
        half = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
        acc = (half, half)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    for i in range(full_first, full_last):
        acc, m, l = _take_block(
            acc, m, l, q_tile, k_store, v_store, pages, cache_row, h_k,
            (lo + i - kept) * BLOCK_N, None, None, t, h, row, score,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, ONE_PAGE, ROW_BYTES, RAISED, PRECISION,
            NVIDIA,
        )  # fmt: skip
    before = full_first - first
    for i in range(0, before + last - full_last):
        visit = tl.where(i < before, first + i, full_last + i - before)
        n_first = tl.where(visit < kept, visit, lo + visit - kept) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        keep = valid[None, :] & visible(t[:, None], k_pos[None, :], h[:, None], row, mask)
        acc, m, l = _take_block(
            acc, m, l, q_tile, k_store, v_store, pages, cache_row, h_k, n_first, valid, keep,
            t, h, row, score,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, ONE_PAGE, ROW_BYTES, RAISED, PRECISION,
            NVIDIA,
        )  # fmt: skip

    if IN_PARTS and NVIDIA >= EARLY_FROM:
        # `combine` may take its place from here on; it waits for what is written below.
        gdc_launch_dependents()
    if CODES:
        acc = interleave(acc[0], acc[1])
    result, lse = finish(acc, m, l)
    # Nobody reads the output of a part without a key.
    needed = in_rows
    if IN_PARTS:
        needed = in_rows & (lse > float("-inf"))
    cols = tl.arange(0, BLOCK_DV)
    tl.store(
        _pointers(o, part, h, t, O_ALIGN)[:, None] + cols[None, :],
        result.to(o.ptr.dtype.element_ty),
        mask=needed[:, None] & (cols < D_V)[None, :],
    )
    if IN_PARTS:
        facts = value(o.stride_t) - PART_FACTS
        tl.store(_pointers(o, part, h, t, O_ALIGN) + facts, lse, mask=in_rows)
    else:
        tl.store(lse_ptr + (b * H_q + h).to(tl.int64) * T_q + t, lse, mask=in_rows)


def launch_decode(
    q: Tensor,
    cache: CacheTensors,
    starts: Tensor | None,
    new_lengths: Tensor | None,
    options: Options,
    *,
    splits: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v'] in q's dtype and memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], last dim contiguous. Token i of batch row b stands at position
    lengths[row] - new_lengths[b] + i of its row of the cache. D_v' is D_v rounded up to whole 16
    bytes, the columns past D_v being undefined.

    Args:
        starts: int [rows]: the positions before are padding; None: there is none.
        new_lengths: int [B], taken within [0, T_q]: later queries are padding; None: all T_q count.
        options: masks and scores; those of its fields that place queries and keys are not read.
        splits: into how many parts the keys of every row are split; None: as the device needs.
        invariant: split them by positions instead, see `decode_splits`.
    """
    found = _prepared(q, _as_bytes(cache), starts, new_lengths, options, splits, invariant)
    return found(q, cache, starts, new_lengths, options)


def prepare_decode(
    q: Tensor, cache: CacheTensors, starts: Tensor | None, new_lengths: Tensor | None,
    options: Options, *, splits: int | None = None, invariant: bool = False,
) -> PreparedDecode | None:  # fmt: skip
    """`launch_decode` for calls with the signature of this one, ready to launch.

    None where it has users' functions. It depends on `device_key` too, and takes the current device
    for theirs.
    """
    if options.launched_anew:
        return None
    return _prepared(q, _as_bytes(cache), starts, new_lengths, options, splits, invariant)


class PreparedDecode(NamedTuple):
    """The launches of a decode call, and the shapes of what they write.

    parts: the shape of the results of parts, which `combine` merges; None: keys are not split.
    """

    launch: Launch | None
    combine: Launch | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[int, ...] | None

    def __call__(
        self, q: Tensor, cache: CacheTensors, starts: Tensor | None, new_lengths: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run `launch_decode` with the cached launches."""
        o = torch.empty_strided(self.shape, self.strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.shape[:3], dtype=torch.float32, device=q.device)
        if self.launch is None:
            return o, lse
        cache = _as_bytes(cache)
        if self.combine is None or self.parts is None:
            self.launch((q, o, lse, starts, new_lengths, *cache, *options))
            return o, lse
        parts = torch.empty(self.parts, dtype=torch.float32, device=q.device)
        self.launch((q, parts, None, starts, new_lengths, *cache, *options))
        self.combine((), parts, o, lse)
        return o, lse


def _prepared(
    q: Tensor, cache: CacheTensors, starts: Tensor | None, new_lengths: Tensor | None,
    options: Options, splits: int | None, invariant: bool,
) -> PreparedDecode:  # fmt: skip
    """The launches of a call whose cache holds codes as bytes."""
    B, H_q, T_q, _ = q.shape
    D_v = cache.v.shape[3]
    elements = 16 // q.element_size()
    o = empty_in_layout(q, H_q, T_q, -(-D_v // elements) * elements)
    if B * H_q * T_q == 0:
        return PreparedDecode(None, None, o.shape, o.stride(), None)
    tile = decode_tile(q, cache)
    split = split_keys(q, cache, options, tile, splits, invariant)
    out, out_lse, parts, combine = o, None, None, None
    if split.plan is None:
        out_lse = torch.empty(B, H_q, T_q, dtype=torch.float32, device=q.device)
    else:
        parts = (split.parts, H_q, T_q, o.shape[3] + PART_FACTS.value)
        out = torch.empty(parts, dtype=torch.float32, device=q.device)
        combine = combine_launch(out, o, D_v)
    given = (q, out, out_lse, starts, new_lengths, *cache, *options)

    def plan(given: list[Any]) -> Launch:
        q, out, out_lse, starts, new_lengths, *others = given
        own = len(cache)
        return _plan(
            q, out, out_lse, starts, new_lengths, CacheTensors._make(others[:own]),
            type(options)._make(others[own:]), tile, split,
        )  # fmt: skip

    key = None if options.launched_anew else (_plan, signature(given), split)
    launch = cached(key, given, plan, q.dtype)
    return PreparedDecode(launch, combine, o.shape, o.stride(), parts)


def _plan(
    q: Tensor, out: Tensor, out_lse: Tensor | None, starts: Tensor | None,
    new_lengths: Tensor | None, cache: CacheTensors, options: Options, tile: TileConfig,
    split: Split,
) -> Launch:  # fmt: skip
    B, H_q, T_q, D = q.shape
    H_k, D_v = cache.k.shape[1], cache.v.shape[3]
    rows = T_q * H_q // H_k
    mask = mask_by_blocks(options)
    # Of a dense cache each page is a row.
    rows_kept = (cache.k if cache.lengths is None else cache.lengths).shape[0]
    lengths = Lengths(
        cache.lengths,
        new_lengths,
        starts,
        cache.batch_index,
        runtime_int(rows_kept),
        runtime_int(split.capacity),
    )
    tiles_of_rows = blocks(rows, tile.BLOCK_M)
    # Keys of a call without a cache lie in either order, and one kernel serves both.
    in_order = cache.lengths is not None
    # Products with codes take half of the columns each.
    fewest = 16 if cache.k_scale is None else 32
    columns = [max(fewest, block_dim(width)) for width in (D, D_v)]
    return Launch(
        decode_kernel, split.parts * H_k * tiles_of_rows, tile,
        *(_Rows(x, *map(runtime_int, x.stride()[:3])) for x in (q, out)), out_lse,
        *(stored(x, scale, in_order) for x, scale in zip(cache[:2], cache[2:4], strict=True)),
        pages_of(cache), lengths, mask, kernel_score(options),
        Plan(*map(runtime_int, split.plan or (0, 1, 0))),
        B, H_q, H_q // H_k, T_q, tiles_of_rows,
        D, D_v, tile.BLOCK_M, tile.BLOCK_N, *columns, row_alignment(q),
        in_one_page(cache, tile.BLOCK_N), load_bytes(cache),
        shown_by_ranges(options), tile.sum_parts,
        dot_precision(q.dtype), nvidia_capability(),
    )  # fmt: skip


def _as_bytes(cache: CacheTensors) -> CacheTensors:
    """The cache with e4m3 codes as bytes: some GPUs know no fp8."""
    if cache.k.dtype != torch.float8_e4m3fn:
        return cache
    return cache._replace(k=cache.k.view(torch.uint8), v=cache.v.view(torch.uint8))
