"""Block tables for masks that ranges cannot describe.

For every tile of a kernel the table lists the blocks to visit: full blocks from the front of the
row, boundary blocks from its end. It is computed with `mask.visible`, over the range that window,
length and padding leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rules.integers import runtime_int
from ..rules.mask import Mask, any_key, seen_by_position, valid_keys, visible
from ..rules.plans import key_blocks, query_blocks
from ..rules.tile import at_keys, at_queries, batch_row
from .arguments import blocks, kernel_mask
from .key_extents import extents_launch
from .launches import Launch
from .tiles import TileConfig

if TYPE_CHECKING:
    from ...options import Options


class _Block(NamedTuple):
    """A block of head h for a tile's list of `width` blocks, under its number.

    exist [BLOCK_N]: keys that may need a mask; None: all, existing or not. queries: number that see
    such a key in a full block.
    """

    number: Any
    m_first: Any
    n_first: Any
    exist: Any
    queries: Any
    h: Any
    blocks_ptr: Any
    width: Any


@triton.jit
def _note(full, boundary, one, row, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add a block to a tile's list, as full or boundary block, unless it is hidden.

    If positions decide for all pairs, no pair is evaluated.
    """
    m_first, n_first = one.m_first, one.n_first
    if mask.q_positions_ptr is not None:
        m_last = m_first + one.queries - 1
        some, each = seen_by_position(m_first, m_last, n_first, n_first + BLOCK_N - 1, row, mask)
        each = each & (m_last < row.T_q)
        if one.exist is None:
            each = each & row.solid & (n_first >= row.start) & (n_first + BLOCK_N <= row.end)
        if mask.q_documents_ptr is not None or mask.attn_mask_ptr is not None:
            each = False
        if mask.mod is not None:
            each = False
        if each:
            tl.store(one.blocks_ptr + full, one.number)
            full += 1
        elif some:
            full, boundary = _note_pairs(full, boundary, one, row, mask, BLOCK_M, BLOCK_N)
    else:
        full, boundary = _note_pairs(full, boundary, one, row, mask, BLOCK_M, BLOCK_N)
    return full, boundary


@triton.jit
def _note_pairs(full, boundary, one, row, mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`_note` by every pair.

    Counting along queries takes the fewest registers; along keys, lanes would exchange counts.
    """
    m_pos = one.m_first + tl.arange(0, BLOCK_M)
    k_pos = one.n_first + tl.arange(0, BLOCK_N)
    exist = one.exist
    keep = visible(m_pos[:, None], k_pos[None, :], one.h, row, mask)
    keep = keep & (m_pos < row.T_q)[:, None]
    if exist is None:
        keep = keep & valid_keys(k_pos, row, mask)[None, :]
        exist = k_pos >= 0
    seen = tl.sum(keep.to(tl.int32), 0)
    shown = tl.max(tl.where(exist, seen, 0), 0) > 0
    whole = shown & (tl.min(tl.where(exist, seen, one.queries), 0) == one.queries)
    tl.store(one.blocks_ptr + full, one.number, mask=whole)
    tl.store(one.blocks_ptr + one.width - 1 - boundary, one.number, mask=shown & ~whole)
    return full + whole.to(tl.int32), boundary + (shown & ~whole).to(tl.int32)


@triton.jit(do_not_specialize=["T_q", "T_k", "H", "tiles", "width"])
def block_sparsity_kernel(
    mask, counts_ptr, blocks_ptr, T_q, T_k, H, tiles, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Table row of a tile of queries (OF_KEYS: its key blocks), or of a tile of keys.

    1-D grid: tiles, heads, batch.
    """
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // (tiles * H)
    row = batch_row(b, T_q, T_k, mask)
    table_row = tl.program_id(0).to(tl.int64)
    blocks_ptr += table_row * width
    full = 0
    boundary = 0
    if OF_KEYS:
        m_first = tile * BLOCK_M
        m_last = tl.minimum(m_first + BLOCK_M, row.T_q) - 1
        row = at_queries(row, m_first, mask)
        lo, _, _, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
        lo = tl.where(kept > 0, 0, lo)
        hi = tl.maximum(hi, kept)
        # Kernels that read a block of every tile need a valid entry here.
        tl.store(blocks_ptr + width - 1, 0, mask=width > 0)
        for block in range(lo, hi):
            n_first = block * BLOCK_N
            here = at_keys(row, n_first, mask)
            # Nonexistent rows are never stored, so they need no mask.
            queries = m_last + 1 - m_first
            one = _Block(block, m_first, n_first, None, queries, h, blocks_ptr, width)
            full, boundary = _note(full, boundary, one, here, mask, BLOCK_M, BLOCK_N)
    else:
        n_first = tile * BLOCK_N
        row = at_keys(row, n_first, mask)
        k_first = tl.maximum(n_first, row.start)
        k_last = tl.minimum(n_first + BLOCK_N, row.end) - 1
        # Nonexistent keys are stored as 0, so they need no mask.
        valid = valid_keys(n_first + tl.arange(0, BLOCK_N), row, mask)
        lo, _, _, hi = query_blocks(k_first, k_last, row, mask, BLOCK_M)
        # A tile without keys has no pairs for the user's function.
        hi = tl.where(any_key(valid), hi, lo)
        for block in range(lo, hi):
            here = at_queries(row, block * BLOCK_M, mask)
            one = _Block(block, block * BLOCK_M, n_first, valid, BLOCK_M, h, blocks_ptr, width)
            full, boundary = _note(full, boundary, one, here, mask, BLOCK_M, BLOCK_N)
    tl.store(counts_ptr + 2 * table_row, full)
    tl.store(counts_ptr + 2 * table_row + 1, boundary)


class CallTables:
    """Tensors that a kernel reads besides a call's options, and the launches that fill them.

    Args:
        empty: int32, or None. `bind` drops them.
        fills: the launches in order, each with the indices of its arguments: among the options or,
            counted from the end, in `empty`.
    """

    def __init__(
        self, empty: tuple[Tensor | None, ...], fills: Sequence[tuple[Launch, tuple[int, ...]]]
    ) -> None:
        self.empty = empty
        self._fills = fills

    def bind(self, arguments: Sequence[object]) -> None:
        """Bind every launch, as `Launch.bind`; arguments: the options, and `empty`."""
        for launch, _ in self._fills:
            launch.bind(arguments)
        self._shapes = [None if x is None else x.shape for x in self.empty]
        self._device = next(x.device for x in self.empty if x is not None)
        self.empty = ()

    def __call__(self, options: Sequence[Any]) -> list[Tensor | None]:
        """Make and fill the tables of a call with these options."""
        made = [
            None if shape is None else torch.empty(shape, dtype=torch.int32, device=self._device)
            for shape in self._shapes
        ]
        arguments = (*options, *made)
        for launch, places in self._fills:
            launch(arguments, *(arguments[index] for index in places))
        return made


def launch_mask(
    options: Options, q: Tensor, k: Tensor, tile: TileConfig, *, of_keys: bool
) -> tuple[Mask, CallTables | None]:
    """The mask for a `Launch`, and its tables if they differ between calls.

    of_keys: the kernel's tiles are queries, which visit key blocks, else the reverse.
    """
    if options.launched_anew:
        return _complete(options, q, k, tile, of_keys=of_keys), None
    extents = None
    fills: list[tuple[Launch, tuple[int, ...]]] = []
    if options.key_padding_mask is not None:
        extents, fill = extents_launch(options.key_padding_mask)
        fills.append((fill, (options._fields.index("key_padding_mask"), -3)))
    mask = kernel_mask(options, extents)
    if _irregular(options):
        table = _empty_table(options, q, k, tile, of_keys=of_keys)
        fills.append((_blocks_launch(mask, table, options, q, k, tile, of_keys=of_keys), ()))
        mask = mask._replace(**table)
    if not fills:
        return mask, None
    return mask, CallTables((extents, mask.counts_ptr, mask.blocks_ptr), fills)


def mask_for_queries(options: Options, q: Tensor, k: Tensor, tile: TileConfig) -> Mask:
    """The mask of a kernel over tiles of queries, with a table if needed."""
    return _complete(options, q, k, tile, of_keys=True)


def mask_for_keys(options: Options, q: Tensor, k: Tensor, tile: TileConfig) -> Mask:
    """The mask of a kernel over tiles of keys, with a table if needed."""
    return _complete(options, q, k, tile, of_keys=False)


def _complete(options: Options, q: Tensor, k: Tensor, tile: TileConfig, *, of_keys: bool) -> Mask:
    mask = kernel_mask(options)
    if not _irregular(options):
        return mask
    mod = options.mask_mod
    kept: dict[Any, Any] = getattr(mod, "tables", {})
    key = None
    # A graph makes its own: its replays may find other numbers in the tensors of the mask.
    if hasattr(mod, "tables") and mod.may_keep(q.device):
        sizes = (*q.shape[:3], k.shape[2], tile.BLOCK_M, tile.BLOCK_N)
        key = _table_key(mask, sizes, of_keys, q.device)
    if key in kept:
        fields, _ = kept[key]
        return mask._replace(**fields)
    table = _empty_table(options, q, k, tile, of_keys=of_keys)
    _blocks_launch(mask, table, options, q, k, tile, of_keys=of_keys)(())
    if key is not None:
        if len(kept) >= _TABLES_KEPT:
            del kept[next(iter(kept))]
        # Keep the source tensors alive, as their addresses are part of the key.
        kept[key] = (table, mask)
    return mask._replace(**table)


def _irregular(options: Options) -> bool:
    if options.batch_invariant:  # a list has full blocks first
        return False
    masks = (
        options.stride,
        options.q_documents,
        options.attn_mask,
        options.mask_mod,
        options.q_positions,
    )
    return any(x is not None for x in masks)


def per_head(options: Options) -> bool:
    """Whether the mask may differ between heads."""
    of_mod = options.mask_mod is not None and getattr(options.mask_mod, "per_head", True)
    return of_mod or (options.attn_mask is not None and options.attn_mask.shape[1] > 1)


def _per_batch(options: Options) -> bool:
    """Whether the mask differs between batch rows."""
    own = (options.query_offsets, options.key_lengths, options.key_padding_mask)
    further = (options.prefix_lengths, options.q_documents, options.cu_seqlens_q)
    of_mod = options.mask_mod is not None and getattr(options.mask_mod, "per_batch", True)
    shared = (options.attn_mask, options.q_positions, options.k_positions)
    of_tensors = any(x is not None and x.shape[0] > 1 for x in shared)
    return of_mod or of_tensors or any(x is not None for x in own + further)


def _empty_table(
    options: Options, q: Tensor, k: Tensor, tile: TileConfig, *, of_keys: bool
) -> dict[str, Any]:
    """Table fields of `Mask`: the blocks of each tile of the kernel."""
    B, H_q, T_q, _ = q.shape
    per_batch, heads = _per_batch(options), H_q if per_head(options) else 1
    (T, BLOCK), (T_other, BLOCK_OTHER) = (T_q, tile.BLOCK_M), (k.shape[2], tile.BLOCK_N)
    if not of_keys:
        T, BLOCK, T_other, BLOCK_OTHER = T_other, BLOCK_OTHER, T, BLOCK
    tiles, width = blocks(T, BLOCK), blocks(T_other, BLOCK_OTHER)
    if options.cu_seqlens_q is not None:
        B = options.cu_seqlens_q.shape[0] - 1
        # A sequence may own a slot past its end (`tile.sequence_of`), for which a row says "none".
        tiles = T // BLOCK + 1
    rows = (B if per_batch else 1) * heads
    strides = (heads * tiles if per_batch else 0, tiles if heads > 1 else 0, width)
    return {
        "counts_ptr": q.new_empty(rows, tiles, 2, dtype=torch.int32),
        "blocks_ptr": q.new_empty(rows, tiles, width, dtype=torch.int32),
        "table_strides": tuple(map(runtime_int, strides)),
    }


def _blocks_launch(
    mask: Mask,
    table: dict[str, Any],
    options: Options,
    q: Tensor,
    k: Tensor,
    tile: TileConfig,
    *,
    of_keys: bool,
) -> Launch:
    rows, tiles, width = table["blocks_ptr"].shape
    into = (table["counts_ptr"], table["blocks_ptr"])
    sizes = (q.shape[2], k.shape[2], q.shape[1] if per_head(options) else 1, tiles, width)
    rest = (mask, *into, *sizes, tile.BLOCK_M, tile.BLOCK_N, of_keys)
    return Launch(block_sparsity_kernel, rows * tiles, {"num_warps": 8}, *rest)


# A mask has up to three tables for each shape and set of other options.
_TABLES_KEPT = 24


def _table_key(
    mask: Mask, sizes: tuple[int, ...], of_keys: bool, device: torch.device
) -> tuple[Any, ...] | None:
    """Cache key of a table, or None if a change could go unnoticed."""
    key: list[Any] = [sizes, of_keys, device]
    if device.type == "cuda":  # another stream would not wait until a table is filled
        key.append(triton.runtime.driver.active.get_current_stream(device.index))
    for x in (*mask._replace(extents_ptr=None, tensors=()), *mask.tensors):
        if isinstance(x, Tensor):
            if x.is_inference():
                return None
            x = (x.data_ptr(), x._version, x.dtype, x.shape, x.stride())
        key.append(x)
    return tuple(key)
