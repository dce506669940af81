"""Tiles of queries that share a list of key blocks, the keys of a list, and inverted lists.

A list serves `block_q` queries of every head that shares it. These heads read one K/V head, so
their queries are the rows of one tile: row `slot` is query slot // heads of head slot % heads.
Consecutive lists of few rows share a tile, which visits the union of their blocks (`merged`).
Blocks have any number `block_k` of keys: short ones are gathered in one tile, long ones take
several. Backward uses inverted lists, see `inverted`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..launch import tiles
from ..launch.arguments import block_dim, blocks
from ..launch.tiles import TileConfig
from ..rules.integers import runtime_int, value
from ..rules.mask import valid_keys
from ..rules.operands import row_pointers
from ..rules.tile import batch_row, load_at

# Rows to which lists are merged: the least of a matrix product.
_MERGED_ROWS = 16


class Lists(NamedTuple):
    """Lists, or inverted lists, as a kernel argument; integers as `runtime_int`s.

    numbers_ptr: int32 [B, H_s, ..., width], numbers of key blocks, or of lists. words_ptr: int32
    like it, which of the merged lists name the block, a bit each; None: lists are not merged.
    ends_ptr: int32, the length of each list, or the start of each key block's numbers, which end at
    the next start. count: lists of a head.
    """

    numbers_ptr: Any
    words_ptr: Any
    ends_ptr: Any
    H_s: Any
    width: Any
    count: Any


class Shape(NamedTuple):
    """Compile-time constants: heads that share a list and a K/V head, queries and keys of a block,
    lists that share a tile.

    They are constant in a model, and rows are divided by them.
    """

    HEADS: int
    BLOCK_Q: int
    BLOCK_K: int
    LISTS: int = 1

    @property
    def rows(self) -> int:
        """Query rows of the lists of a tile."""
        return self.HEADS * self.BLOCK_Q * self.LISTS


class ListTile(NamedTuple):
    """A tile of queries that share a list.

    row: of the batch. h, rows, in_rows, statistics [BLOCK_M]: heads, queries, their existence, and
    offsets in tensors [B, H_q, T_q]. own [BLOCK_M]: which of the merged lists is a row's.
    blocks_ptr, words_ptr: the list. steps: tiles of its keys.
    """

    row: Any
    h: Any
    h_k: Any
    rows: Any
    in_rows: Any
    statistics: Any
    own: Any
    blocks_ptr: Any
    words_ptr: Any
    count: Any
    steps: Any


@triton.jit
def list_queries(slot, number, group, shape: tl.constexpr):
    """(head, query) of a row of the tiles of a (merged) list; group: of heads that share it."""
    HEADS: tl.constexpr = shape.HEADS
    BLOCK_Q: tl.constexpr = shape.BLOCK_Q * shape.LISTS
    return group * HEADS + slot % HEADS, number * BLOCK_Q + slot // HEADS


@triton.jit
def list_tile(
    H_q, H_k, T_q, T_k, mask, lists, shape: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile of this program. 1-D grid: tiles of a list, lists from the last on, heads, batch."""
    ROWS: tl.constexpr = shape.HEADS * shape.BLOCK_Q
    SLOTS: tl.constexpr = ROWS * shape.LISTS
    TILES: tl.constexpr = (SLOTS + BLOCK_M - 1) // BLOCK_M
    groups = H_q // shape.HEADS
    pid = tl.program_id(0)
    count = value(lists.count)
    number = count - 1 - (pid // TILES) % count
    group = (pid // (TILES * count)) % groups
    b = pid // (TILES * count * groups)
    slot = (pid % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    h, rows = list_queries(slot, number, group, shape)
    in_rows = (slot < SLOTS) & (rows < T_q)
    index = list_head(b, group, groups, lists) * count + number
    listed = tl.load(lists.ends_ptr + index)
    blocks_ptr = lists.numbers_ptr + index * value(lists.width)
    words_ptr = blocks_ptr if shape.LISTS == 1 else lists.words_ptr + index * value(lists.width)
    return ListTile(
        batch_row(b, T_q, T_k, mask),
        h,
        group * H_k // groups,
        rows,
        in_rows,
        (b * H_q + h).to(tl.int64) * T_q + rows,
        slot // ROWS,
        blocks_ptr,
        words_ptr,
        listed,
        tl.cdiv(listed * shape.BLOCK_K, BLOCK_N),
    )


@triton.jit
def list_head(b, group, groups, lists):
    """64-bit index in [B, H_s] of a group of heads."""
    return (b * value(lists.H_s) + group * value(lists.H_s) // groups).to(tl.int64)


@triton.jit
def list_keys(i, tile, mask, shape: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions of the i-th tile of a list's keys, their existence, and the words of their blocks
    for `listed_pairs`.

    Entries past the list have positions after all keys.
    """
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    first = i * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    word = columns
    if BLOCK_K % BLOCK_N == 0:
        block = tl.load(tile.blocks_ptr + first // BLOCK_K)
        k_pos = block * BLOCK_K + first % BLOCK_K + tl.arange(0, BLOCK_N)
        if shape.LISTS > 1:
            word = columns * 0 + tl.load(tile.words_ptr + first // BLOCK_K)
    else:
        listed = columns // BLOCK_K < tile.count
        block = tl.load(tile.blocks_ptr + columns // BLOCK_K, mask=listed, other=0)
        k_pos = tl.where(listed, block * BLOCK_K + columns % BLOCK_K, tile.row.T_k)
        if shape.LISTS > 1:
            word = tl.load(tile.words_ptr + columns // BLOCK_K, mask=listed, other=0)
    return k_pos, valid_keys(k_pos, tile.row, mask), word


@triton.jit
def listed_pairs(keep, word, tile, shape: tl.constexpr):
    """keep [BLOCK_M, BLOCK_N], without the pairs that a row's own list does not name."""
    if shape.LISTS > 1:
        keep = keep & (((word[None, :] >> tile.own[:, None]) & 1) > 0)
    return keep


@triton.jit
def _pointers(x, b, h, rows, COLS: tl.constexpr):
    """Pointers [ROWS, COLS] to arbitrary rows of a `operands.Strided`."""
    ALIGN: tl.constexpr = 128 // x.ptr.dtype.element_ty.primitive_bitwidth
    return row_pointers(x, b, h, rows, ALIGN)[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit
def load_rows_at(x, b, h, rows, keep, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """`tile.load_tile` for arbitrary rows, of one head or different heads."""
    return load_at(_pointers(x, b, h, rows, COLS), keep, COLS, WIDTH)


@triton.jit
def store_rows_at(x, b, h, rows, tile, keep, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Write tile [ROWS, COLS] where `load_rows_at` reads."""
    within = keep[:, None] & (tl.arange(0, COLS) < WIDTH)[None, :]
    tl.store(_pointers(x, b, h, rows, COLS), tile.to(x.ptr.dtype.element_ty), mask=within)


def lists_argument(numbers: Tensor, words: Tensor | None, ends: Tensor, count: int) -> Lists:
    """`Lists` of numbers [B, H_s, ..., width], words and ends; count: lists of a head."""
    integers = map(runtime_int, (numbers.shape[1], numbers.shape[-1], count))
    return Lists(numbers, words, ends, *integers)


def shape_of(lists: Tensor, block: tuple[int, int], q: Tensor, k: Tensor) -> Shape:
    """`Shape` of lists [B, H_s, R, n]."""
    return Shape(q.shape[1] // max(k.shape[1], lists.shape[1]), *block)


def by_queries(
    lists: Tensor, counts: Tensor, block: tuple[int, int], q: Tensor, k: Tensor
) -> tuple[Lists, Shape, int]:
    """Argument and shape of a kernel over tiles of queries, and its number of lists.

    Lists of few rows are merged: their tiles have no more products than those of a list each, and
    fewer where lists share blocks.
    """
    shape = shape_of(lists, block, q, k)
    shape = shape._replace(LISTS=max(1, _MERGED_ROWS // shape.rows))
    words = None
    if shape.LISTS > 1:
        lists, words, counts = merged(lists, blocks(k.shape[2], block[1]), shape.LISTS)
    count = lists.shape[2]
    argument = lists_argument(lists, words, counts, count)
    return argument, shape, q.shape[0] * q.shape[1] // shape.HEADS * count


def merged(lists: Tensor, key_blocks: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The union of each `count` consecutive lists, in order; words, of which bit i says that the
    i-th of them names the block; lengths of the unions.

    lists: int32 [B, H_s, R, n], distinct key blocks padded with `key_blocks`. Returns int32
    [B, H_s, ceil(R / count), width], the same, and [B, H_s, ceil(R / count)].
    """
    B, H_s, R, n = lists.shape
    lists = F.pad(lists, (0, 0, 0, -R % count), value=key_blocks)
    numbers, places = lists.reshape(B, H_s, blocks(R, count), count * n).sort(dim=-1)
    sums = (1 << places // max(n, 1)).cumsum(-1)
    more = F.pad(numbers[..., 1:] == numbers[..., :-1], (0, min(1, n)))
    numbers, order = numbers.masked_fill(more, key_blocks).sort(dim=-1, stable=True)
    numbers, order = (x[..., :key_blocks].contiguous() for x in (numbers, order))
    # `sums` up to a block's last entry, less those up to the block before.
    words = sums.gather(-1, order)
    words[..., 1:] -= words[..., :-1].clone()
    return numbers, words.to(torch.int32), (numbers < key_blocks).sum(-1, dtype=torch.int32)


def inverted(lists: Tensor, key_blocks: int) -> tuple[Tensor, Tensor]:
    """Invert lists int32 [B, H_s, R, n], padded with `key_blocks`: numbers of lists, int32 [B, H_s,
    R n], ordered by key block, and the start of each block's, int32 [B, H_s, key_blocks + 1].
    """
    # Stable, so that sums are deterministic.
    blocks, places = lists.flatten(2).sort(dim=-1, stable=True)
    numbers = torch.arange(key_blocks + 1, dtype=torch.int32, device=lists.device)
    starts = torch.searchsorted(blocks, numbers.expand(*blocks.shape[:2], -1).contiguous())
    return (places // max(lists.shape[3], 1)).to(torch.int32), starts.to(torch.int32)


def tile_of_lists(kernel: str, q: Tensor, D_v: int, shape: Shape) -> TileConfig:
    """The tile of an attention kernel for calls that modify scores, as row pointers take as many
    registers, limited to a list's queries or a block's keys.
    """
    widest = max(block_dim(q.shape[3]), block_dim(D_v))
    tile = tiles.lookup(kernel, q.element_size(), widest, "scores")
    of_keys = kernel == "backward_dkv"
    most = shape.BLOCK_K if of_keys else shape.rows
    if of_keys and not tiles.current_arch().startswith("sm_"):
        most = min(most, 64)  # AMD's compiler spills with more
    side = "BLOCK_N" if of_keys else "BLOCK_M"
    rows = min(getattr(tile, side), max(16, triton.next_power_of_2(most)))
    warps = min(4, tile.num_warps) if rows < 64 else tile.num_warps
    return replace(tile, num_warps=warps, **{side: rows})
