"""Decoding's tiles, and among how many programs the keys of a row are split."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..rules.pages import CacheTensors, row_bytes
from . import tiles
from .arguments import UNBOUNDED, block_dim, blocks
from .tiles import TileConfig

if TYPE_CHECKING:
    from fastattn.options import Options

# Tokens of a split that does not depend on the batch: the unit of batch-invariant decoding. A
# multiple of every BLOCK_N.
INVARIANT_SPLIT = 512
# Partial results are written and read again: more splits than this cost more than they bring.
_MOST_SPLITS = 128
# Programs that share a multiprocessor, enough for its memory requests to overlap.
_PROGRAMS_AT_ONCE = 2
# Rows that start at multiples of 2 or 4 bytes are loaded in pieces of as many: of so few keys the
# registers hold all addresses.
_SMALL_PIECES = 4
_KEYS_IN_SMALL_PIECES = 16
# A tile of these rows serves all but chunks of a prompt.
_FEW_ROWS = 16


class Split(NamedTuple):
    """How the keys of a call are split.

    capacity: what no position of a key reaches. parts: how many there are. blocks: of each, where
    it is given certain positions; 0 where the keys of a row are dealt out evenly.
    """

    capacity: int
    parts: int
    blocks: int


def split_keys(
    q: Tensor, cache: CacheTensors, options: Options, tile: TileConfig, count: int | None,
    invariant: bool,
) -> Split:  # fmt: skip
    """The split of a call's keys into `count`; None: as the device needs, or by positions."""
    capacity = _capacity(cache, options)
    if invariant:
        count = max(1, blocks(capacity, INVARIANT_SPLIT))
        return Split(capacity, count, INVARIANT_SPLIT // tile.BLOCK_N)
    if count is None:
        B, H_q, T_q, _ = q.shape
        H_k = cache.k.shape[1]
        programs = B * H_k * blocks(T_q * H_q // H_k, tile.BLOCK_M)
        count = _split_count(programs, _visits(capacity, T_q, options, tile.BLOCK_N), q.device)
    return Split(capacity, count, 0)


def decode_tile(q: Tensor, cache: CacheTensors) -> TileConfig:
    """The tile for a few rows or for a chunk of a prompt, in stages as deep as the cache asks."""
    _, H_q, T_q, D = q.shape
    few = T_q * H_q // cache.k.shape[1] <= _FEW_ROWS
    widest = max(block_dim(D), block_dim(cache.v.shape[3]))
    tile = tiles.lookup("decode" if few else "decode_chunk", q.element_size(), widest)
    if row_bytes(cache) <= _SMALL_PIECES:
        tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, _KEYS_IN_SMALL_PIECES))
    # Of stages NVIDIA's pipeline gives a block table half.
    deeper = cache.block_table is not None and tiles.current_arch().startswith("sm_")
    return replace(tile, num_stages=2 * tile.num_stages - 1) if deeper else tile


def reads_e4m3() -> bool:
    """Whether the device converts e4m3 numbers by itself, which is the faster way."""
    arch = tiles.current_arch()
    return arch.startswith("sm_") and int(re.sub(r"\D", "", arch)) >= 89


def in_one_page(cache: CacheTensors, BLOCK_N: int) -> bool:
    """Whether the slots of a block of positions follow one another in one page."""
    if cache.block_table is None:
        return cache.keep_first is None
    return cache.k.shape[2] % BLOCK_N == 0


def _capacity(cache: CacheTensors, options: Options) -> int:
    """What no position of a key reaches: the end of the cache, or of a tensor that it indexes."""
    S = cache.k.shape[2]
    ends = [x.shape[3] for x in (options.attn_mask, options.attn_bias) if x is not None]
    if cache.block_table is not None:
        ends.append(S * cache.block_table.shape[1])
    elif cache.keep_first is None:
        ends.append(S)
    return min(ends, default=UNBOUNDED)


def _visits(capacity: int, T_q: int, options: Options, BLOCK_N: int) -> int:
    """The most key blocks that a tile of rows may need."""
    keys = capacity
    if options.left is not None and options.stride is None:
        keys = min(keys, options.left + T_q + options.keep_first)
    return blocks(keys, BLOCK_N) + 2 * (keys < capacity)


@cache
def _split_count(programs: int, visits: int, device: torch.device) -> int:
    """The smallest number of splits that keeps the device about as busy as any other would."""
    at_once = _PROGRAMS_AT_ONCE * tiles.multiprocessors(device)
    most = max(1, min(visits, _MOST_SPLITS, blocks(2 * at_once, programs)))

    def busy(splits: int) -> float:
        waves = programs * splits / at_once
        return waves / -(-programs * splits // at_once)

    best = max(map(busy, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if busy(n) >= 0.85 * best)
