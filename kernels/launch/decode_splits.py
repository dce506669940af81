"""Decoding's tiles, and among how many programs the keys of a row are split."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from ..rules.pages import CacheTensors, row_bytes, widths
from ..rules.splits import FEWEST_BLOCKS
from . import tiles
from .arguments import UNBOUNDED, block_dim, blocks, index_type
from .tiles import TileConfig

if TYPE_CHECKING:
    from fastattn.options import Options

# Tokens of a split that does not depend on the batch: the unit of batch-invariant decoding. A
# multiple of every BLOCK_N.
INVARIANT_SPLIT = 512
# Partial results are written and read again: more splits than this cost more than they bring.
_MOST_SPLITS = 128
# Programs that share a multiprocessor, enough for its memory requests to overlap, unless another
# number was tuned.
PROGRAMS_AT_ONCE = 2
# More waves than these are not tried to fill the last one better.
_MOST_WAVES = 4
# Where every row is a program, one of so few blocks does not keep the others waiting,
_FEW_BLOCKS = 16
# and one of any length not for long where there are so many waves of them.
_MANY_WAVES = 8
# Rows that start at multiples of 2 or 4 bytes are loaded in pieces of as many: of so few keys the
# registers hold all addresses.
_SMALL_PIECES = 4
_KEYS_IN_SMALL_PIECES = 16
# A tile of these rows serves all but chunks of a prompt.
_FEW_ROWS = 16
# A program walks fewer keys than these in the time that merging their parts would take.
MANY_KEYS = 256
# A program of forward takes so many rows of one head, whether there are as many or not, and one of
# a chunk so many of all heads that share keys.
_FORWARD_ROWS, _CHUNK_ROWS = 128, 64
# A row of a chunk takes at most twice as long as one of forward: 1.25 times by machine code, and
# on an H100 Hopper's forward was measured to be 1.4 times as fast as the portable one.
_CHUNK_COST = 2
# Merging the parts of a device full of chunks takes what a tile of forward takes for so many keys:
# 20 MB written and read, and a launch.
_MERGING_KEYS = 1024
# Queries and keys of calls that split their keys on any device, with two batch rows and two heads
# that share keys: one in the tile of few rows, one in that of a chunk.
SPLIT_CALLS = ((1, MANY_KEYS), (16, 4096))


class Split(NamedTuple):
    """How the keys of a call are split.

    capacity: what no position of a key reaches. parts: the most there may be. plan: see
    `splits.Plan`; None: keys are not split, and each batch row is one part.
    """

    capacity: int
    parts: int
    plan: tuple[int, int, int] | None


def split_keys(
    q: Tensor, cache: CacheTensors, options: Options, tile: TileConfig, count: int | None,
    invariant: bool,
) -> Split:  # fmt: skip
    """The split of each row's keys into `count`; None: by the work of all rows, or by positions."""
    capacity = _capacity(cache, options)
    B, H_q, T_q, _ = q.shape
    if invariant:
        count = _invariant_parts(capacity, T_q, options)
        return Split(capacity, B * count, (0, count, INVARIANT_SPLIT // tile.BLOCK_N))
    if count is not None:
        return Split(capacity, B * count, (0, count, 0) if count > 1 else None)
    H_k = cache.k.shape[1]
    heads = H_k * blocks(T_q * H_q // H_k, tile.BLOCK_M)
    visits = max(1, _visits(capacity, T_q, options, tile.BLOCK_N))
    shares = _shares(B, heads, visits, _at_once(q, cache))
    if shares is None and cache.lengths is not None:
        return Split(capacity, B, None)
    shares = shares or B
    # Each row may have one part more than its shares, but none that is empty beside others.
    return Split(capacity, min(shares + B, B * visits), (shares, 0, 0))


def _at_once(q: Tensor, cache: CacheTensors) -> int:
    """Programs that the device runs side by side."""
    programs = tiles.programs_at_once(cache.k.element_size(), _widest(cache)) or PROGRAMS_AT_ONCE
    return programs * tiles.multiprocessors(q.device)


class PackedSplit(NamedTuple):
    """A launch for packed queries: the rows of `fewest` to `most` tokens, and how keys are split.

    places: of results of parts, 0: no tile has several.
    """

    tile: TileConfig
    split: Split
    fewest: int
    most: int
    places: int


def split_packed(
    q: Tensor, B: int, longest: int, cache: CacheTensors, options: Options, invariant: bool
) -> list[PackedSplit]:
    """The launches for B rows of packed queries q [1, H_q, total, D], of at most `longest` tokens.

    How many tokens a row has the device knows. Rows whose tokens fill no tile of few rows are one
    launch, the others another: each has programs for as many tiles as there may be.

        H_q / H_k = 4, rows of 300, 1, 1, 0 and 1 tokens
            tiles of 16   at most one a row: 4 of 16 rows hold the token of 4 heads, three times
            tiles of 64   303 * 4 // 64 + 1 are enough: 19 hold 1200 rows
    """
    H_q, total = q.shape[1:3]
    G = H_q // cache.k.shape[1]
    few = _FEW_ROWS // G
    groups = []
    if few:
        tile = decode_tile(q, cache, few=True)
        groups.append(_packed(q, cache, options, tile, (1, min(few, longest)), B, B, invariant))
    if longest > few:
        tile = decode_tile(q, cache, few=False)
        if options.registers in ("scores", "heavy"):
            # What tests or changes each score takes the registers of half of the keys.
            keys = max(16, tile.BLOCK_N // 2)
            tile = replace(tile, BLOCK_N=keys, sum_parts=min(tile.sum_parts, keys // 2))
        rows = min(B, total // (few + 1))
        most = total * G // tile.BLOCK_M + rows
        # Of the tokens, so many at least are in longer rows.
        least = max(1, (total - few * B) * G // tile.BLOCK_M)
        groups.append(_packed(q, cache, options, tile, (few + 1, longest), most, least, invariant))
    return groups


def _packed(
    q: Tensor, cache: CacheTensors, options: Options, tile: TileConfig, tokens: tuple[int, int],
    most: int, least: int, invariant: bool,
) -> PackedSplit:  # fmt: skip
    """The launch for rows with a number of tokens in a range, of which there are `least` to `most`
    tiles.
    """
    capacity = _capacity(cache, options)
    of_tile = min(tokens[1], tile.BLOCK_M)
    if invariant and tokens[0] == 1:
        count = _invariant_parts(capacity, of_tile, options)
        split = Split(capacity, most * count, (0, count, INVARIANT_SPLIT // tile.BLOCK_N))
        return PackedSplit(tile, split, *tokens, most * count if count > 1 else 0)
    visits = max(1, _visits(capacity, of_tile, options, tile.BLOCK_N))
    shares = None if invariant else _shares(least, cache.k.shape[1], visits, _at_once(q, cache))
    if shares is None:
        # One share holds every row whole.
        return PackedSplit(tile, Split(capacity, most, (1, 0, 0)), *tokens, 0)
    # A tile has several parts only if each takes more than half of a share.
    split = Split(capacity, min(shares + most, most * visits), (shares, 0, 0))
    return PackedSplit(tile, split, *tokens, min(2 * shares, most * visits))


def decode_tile(q: Tensor, cache: CacheTensors, few: bool | None = None) -> TileConfig:
    """The tile for a few rows or for a chunk of a prompt, in stages as deep as the cache asks."""
    if few is None:
        few = q.shape[2] * q.shape[1] // cache.k.shape[1] <= _FEW_ROWS
    kernel, widest = "decode" if few else "decode_chunk", _widest(cache)
    calls: Literal["shared", "codes", "plain"] = "plain"
    if cache.shared and widest > 256:  # what is loaded once leaves room for more keys
        calls = "shared"
    elif cache.k_scale is not None and cache.block_table is not None:
        calls = "codes"
    tile = tiles.lookup(kernel, q.element_size(), widest, calls)
    if cache.k_scale is not None and widest > 256:  # codes take registers beside wide accumulators
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, 32))
    if load_bytes(cache) <= _SMALL_PIECES:
        tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, _KEYS_IN_SMALL_PIECES))
    tile = replace(tile, sum_parts=min(tile.sum_parts, tile.BLOCK_N // 2))
    # Of stages NVIDIA's pipeline gives a block table half.
    deeper = cache.block_table is not None and tiles.current_arch().startswith("sm_")
    return replace(tile, num_stages=2 * tile.num_stages - 1) if deeper else tile


def load_bytes(cache: CacheTensors) -> int:
    """`row_bytes`, or 1 where codes cannot be loaded by twos: of rows that are parts of longer ones
    the last may have no neighbour, and the first may start between two.
    """
    if cache.k_scale is not None:
        by_twos = (x.shape[3] % 2 == 0 and x.data_ptr() % 16 == 0 for x in (cache.k, cache.v))
        if not all(by_twos):
            return 1
    return row_bytes(cache)


def _widest(cache: CacheTensors) -> int:
    return max(map(block_dim, widths(cache)))


def nvidia_capability() -> int:
    """The device's compute capability, as 89, or 0 where it is not NVIDIA's."""
    return _capability_of(tiles.current_arch())


@cache
def _capability_of(arch: str) -> int:
    return int(re.sub(r"\D", "", arch)) if arch.startswith("sm_") else 0


def in_one_page(cache: CacheTensors, BLOCK_N: int) -> bool:
    """Whether the slots of a block of positions follow one another in one page."""
    if cache.block_table is None:
        return cache.keep_first is None
    return cache.k.shape[2] % BLOCK_N == 0


def row_alignment(q: Tensor) -> int:
    """Elements that the start of every row is a multiple of: 16 bytes of them if it can be."""
    elements = 16 // q.element_size()
    steps = zip(q.shape[:3], q.stride()[:3], strict=True)
    whole = all(size == 1 or stride % elements == 0 for size, stride in steps)
    return elements if whole and q.data_ptr() % 16 == 0 else 1


def _capacity(cache: CacheTensors, options: Options) -> int:
    """Bound on the positions of keys: the end of the cache, or of a tensor that it indexes."""
    S = cache.k.shape[2]
    if cache.lengths is None:
        return S
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


def _invariant_parts(capacity: int, T_q: int, options: Options) -> int:
    """The most parts by positions that a tile of rows may need."""
    parts = blocks(capacity, INVARIANT_SPLIT)
    if options.left is not None and options.stride is None:
        # One more than they fill: a window begins anywhere in its first part.
        of_window = blocks(options.left + T_q, INVARIANT_SPLIT) + 1
        parts = min(parts, blocks(options.keep_first, INVARIANT_SPLIT) + of_window)
    return max(1, parts)


def why_not_split(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why a call of attention does not split its keys among programs, or None if it does.

    One tile a head would leave most multiprocessors idle while each program walks all keys.
    """
    if options.cu_seqlens_q is not None:
        return "sequences are packed"
    rows, T_k = q.shape[2] * q.shape[1] // k.shape[1], k.shape[2]
    if T_k < MANY_KEYS:
        return f"there are fewer than {MANY_KEYS} keys, {T_k}"
    if rows > _FEW_ROWS and not _chunk_pays(q, k, options):
        return f"{rows} rows of queries for a K/V head are too many to split {T_k} keys for"
    if options.dropout:
        return "its kernel does not know dropout"
    if options.fp32_results:
        return "its kernel rounds o to the dtype of q"
    if options.q_positions is not None:
        return "its kernel does not know positions"
    if options.relative_keys is not None:
        return "its kernel does not know relative_keys"
    if options.key2 is not None:
        return "its kernel does not know key2"
    if index_type(k, v).primitive_bitwidth > 32:
        return "keys lie too far apart in memory"
    return None


def _chunk_pays(q: Tensor, k: Tensor, options: Options) -> bool:
    """Whether queries that are few beside their keys are done sooner as a chunk of a prompt.

    Forward takes G heads one by one, and has programs for as many multiprocessors as it has tiles.
    A chunk has the rows of all G heads in its tiles, and keys are split until the device is full:

        T_q = 64, H_q = 32, H_k = 8, B = 1        forward: 32 programs, each half full, all keys
                                                  chunk: 32 tiles of 64 rows, in as many parts as
                                                  there is room for

    Times are rows of a multiprocessor, each of which meets all keys.
    """
    B, H_q, T_q, _ = q.shape
    H_k, T_k = k.shape[1:3]
    if 2 * T_q > T_k:
        return False
    device = tiles.multiprocessors(q.device)
    programs = B * H_q * blocks(T_q, _FORWARD_ROWS)
    forward = _FORWARD_ROWS * max(device, programs)
    chunk = _CHUNK_COST * _CHUNK_ROWS * B * H_k * blocks(T_q * H_q // H_k, _CHUNK_ROWS)
    keys = _visits(T_k, T_q, options, 1)
    return keys * (forward - chunk) > _MERGING_KEYS * _FORWARD_ROWS * device


@cache
def _shares(B: int, heads: int, visits: int, at_once: int) -> int | None:
    """Into how many shares the keys of B rows are divided; None: a row need not be split.

    heads: programs that have the same keys to split. visits: the most key blocks of a row.
    at_once: programs that the device runs side by side.
    """
    count = _split_count(B * heads, visits, at_once)
    if count == 1 and (visits <= _FEW_BLOCKS or B * heads >= _MANY_WAVES * at_once):
        return None
    return B * count


def _split_count(programs: int, visits: int, at_once: int) -> int:
    """The smallest number of splits of equal rows that keeps the device about as busy as any."""
    most = min(visits // FEWEST_BLOCKS.value, blocks(_MOST_WAVES * at_once, programs))
    most = max(1, min(most, _MOST_SPLITS))
    # As many as there are with blocks dealt out evenly: a split more would find none.
    counts = [n for n in range(1, most + 1) if blocks(visits, blocks(visits, n)) == n]

    def busy(splits: int) -> float:
        waves = programs * splits / at_once
        return waves / -(-programs * splits // at_once)

    best = max(map(busy, counts))
    return next(n for n in counts if busy(n) >= 0.85 * best)
