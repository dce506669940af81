"""Tables of blocks for masks that no range can describe.

For every tile of a kernel the table lists the blocks that it visits: those without a hidden pair
from the front of the row, those with some from its end. It is made with the rule `mask.visible`,
so nothing is stated twice, and only over the range that window, length and padding leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rules.integers import runtime_int
from ..rules.mask import Mask, any_key, batch_row, key_blocks, query_blocks, valid_keys, visible
from .arguments import kernel_mask
from .tiles import TileConfig

if TYPE_CHECKING:
    from fastattn.options import Options


@triton.jit
def _note(full, boundary, block, keep, exist, queries, blocks_ptr, width):
    """Enter a block into the list of a tile: does it show any pair, is no pair to be hidden.

    keep [BLOCK_M, BLOCK_N]: the pairs that are seen. exist: keys of which something may have to be
    hidden. queries: how many see such a key if nothing is. To count along queries takes the fewest
    registers: the other way lanes have to exchange what they count.
    """
    seen = tl.sum(keep.to(tl.int32), 0)
    shown = tl.max(tl.where(exist, seen, 0), 0) > 0
    whole = shown & (tl.min(tl.where(exist, seen, queries), 0) == queries)
    tl.store(blocks_ptr + full, block, mask=whole)
    tl.store(blocks_ptr + width - 1 - boundary, block, mask=shown & ~whole)
    return full + whole.to(tl.int32), boundary + (shown & ~whole).to(tl.int32)


@triton.jit(do_not_specialize=["T_q", "T_k", "H", "width"])
def block_sparsity_kernel(
    mask, counts_ptr, blocks_ptr, T_q, T_k, H, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """The row of one tile of queries (OF_KEYS: the key blocks it visits), or of one of keys."""
    tile = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    row = batch_row(b, T_q, T_k, mask)
    table_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    blocks_ptr += table_row * width
    full = 0
    boundary = 0
    if OF_KEYS:
        m_first = tile * BLOCK_M
        rows = m_first + tl.arange(0, BLOCK_M)
        m_last = tl.minimum(m_first + BLOCK_M, row.T_q) - 1
        # Rows that do not exist are never stored: nothing of them has to be hidden.
        in_rows = (rows < row.T_q)[:, None]
        queries = m_last + 1 - m_first
        lo, _, _, hi, kept = key_blocks(m_first, m_last, row, mask, BLOCK_N)
        lo = tl.where(kept > 0, 0, lo)
        hi = tl.maximum(hi, kept)
        for block in range(lo, hi):
            k_pos = block * BLOCK_N + tl.arange(0, BLOCK_N)
            keep = visible(rows[:, None], k_pos[None, :], h, row, mask)
            keep = keep & in_rows & valid_keys(k_pos, row, mask)[None, :]
            full, boundary = _note(
                full, boundary, block, keep, k_pos >= 0, queries, blocks_ptr, width
            )
    else:
        k_pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_first = tl.maximum(tile * BLOCK_N, row.start)
        k_last = tl.minimum(tile * BLOCK_N + BLOCK_N, row.end) - 1
        valid = valid_keys(k_pos, row, mask)
        lo, _, _, hi = query_blocks(k_first, k_last, row, mask, BLOCK_M)
        # A tile without keys has no pairs to ask the user's function about.
        hi = tl.where(any_key(valid), hi, lo)
        for block in range(lo, hi):
            rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
            keep = visible(rows[:, None], k_pos[None, :], h, row, mask)
            keep = keep & (rows < row.T_q)[:, None]
            # Keys that do not exist are stored as 0: nothing of them has to be hidden.
            full, boundary = _note(full, boundary, block, keep, valid, BLOCK_M, blocks_ptr, width)
    tl.store(counts_ptr + 2 * table_row, full)
    tl.store(counts_ptr + 2 * table_row + 1, boundary)


def with_table(
    mask: Mask, B: int, H: int, T_q: int, T_k: int, BLOCK_M: int, BLOCK_N: int, *, of_keys: bool,
    per_batch: bool, per_head: bool, device: torch.device,
) -> Mask:  # fmt: skip
    """The mask with a table for tiles of BLOCK_M queries and BLOCK_N keys.

    of_keys: a row of the table is a tile of queries and lists key blocks, else the reverse.
    per_batch, per_head: whether rows of the batch, and heads, differ in what they see.
    """
    tiles, width = -(-T_q // BLOCK_M), -(-T_k // BLOCK_N)
    if not of_keys:
        tiles, width = width, tiles
    rows = (B if per_batch else 1) * (H if per_head else 1)
    counts = torch.empty(rows, tiles, 2, dtype=torch.int32, device=device)
    blocks = torch.empty(rows, tiles, width, dtype=torch.int32, device=device)
    heads = H if per_head else 1
    if rows and tiles:
        block_sparsity_kernel[(tiles, rows)](
            mask, counts, blocks, T_q, T_k, heads, width, BLOCK_M, BLOCK_N, of_keys, num_warps=8
        )
    strides = (heads * tiles if per_batch else 0, tiles if per_head else 0, width)
    return mask._replace(
        counts_ptr=counts, blocks_ptr=blocks, table_strides=tuple(map(runtime_int, strides))
    )


def mask_for_queries(options: Options, q: Tensor, k: Tensor, tile: TileConfig) -> Mask:
    """The mask of a kernel that works on tiles of queries, with a table where it takes one."""
    return _complete(options, q, k, tile, of_keys=True)


def mask_for_keys(options: Options, q: Tensor, k: Tensor, tile: TileConfig) -> Mask:
    """The mask of a kernel that works on tiles of keys, with a table where it takes one."""
    return _complete(options, q, k, tile, of_keys=False)


def _complete(options: Options, q: Tensor, k: Tensor, tile: TileConfig, *, of_keys: bool) -> Mask:
    mask = kernel_mask(options)
    mod = options.mask_mod
    irregular = (options.stride, options.q_documents, options.attn_mask, mod)
    if all(x is None for x in irregular):
        return mask
    B, H_q, T_q, _ = q.shape
    T_k = k.shape[2]
    own = (
        options.query_offsets, options.key_lengths, options.key_padding_mask,
        options.prefix_lengths, options.q_documents, options.cu_seqlens_q,
    )  # fmt: skip
    shape = (1, 1) if options.attn_mask is None else options.attn_mask.shape[:2]
    per_batch = shape[0] > 1 or any(x is not None for x in own)
    per_head = shape[1] > 1
    if mod is not None:
        per_batch = per_batch or getattr(mod, "per_batch", True)
        per_head = per_head or getattr(mod, "per_head", True)
    if options.cu_seqlens_q is not None:
        B = options.cu_seqlens_q.shape[0] - 1
    sizes = (B, H_q, T_q, T_k, tile.BLOCK_M, tile.BLOCK_N)
    kept: dict[Any, Any] = getattr(mod, "tables", {})
    place = _place(mask, sizes, of_keys, q.device) if hasattr(mod, "tables") else None
    if place in kept:
        found, _ = kept[place]
        return mask._replace(**found)
    complete = with_table(
        mask, *sizes, of_keys=of_keys, per_batch=per_batch, per_head=per_head, device=q.device
    )
    if place is not None and mod.may_keep(q.device):
        table = {name: getattr(complete, name) for name in _TABLE_FIELDS}
        if len(kept) >= _TABLES_KEPT:
            del kept[next(iter(kept))]
        # With the tensors that it was made from, whose addresses are part of its place.
        kept[place] = (table, mask)
    return complete


_TABLE_FIELDS = ("counts_ptr", "blocks_ptr", "table_strides")
# A mask that is used with a few shapes and other options has three tables for each.
_TABLES_KEPT = 24


def _place(
    mask: Mask, sizes: tuple[int, ...], of_keys: bool, device: torch.device
) -> tuple[Any, ...] | None:
    """What a table depends on, or None where a change of it could go unnoticed."""
    place: list[Any] = [sizes, of_keys, device]
    for x in (*mask._replace(extents_ptr=None, tensors=()), *mask.tensors):
        if isinstance(x, Tensor):
            if x.is_inference():
                return None
            x = (x.data_ptr(), x._version, x.dtype, x.shape, x.stride())
        place.append(x)
    return tuple(place)
