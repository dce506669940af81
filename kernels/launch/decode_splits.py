"""Decoding: tiles, and into how many parts a row's keys are split."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from ..rules.pages import CacheTensors, row_bytes
from ..rules.splits import FEWEST_BLOCKS
from . import tiles
from .arguments import UNBOUNDED, block_dim, blocks, index_type
from .tiles import TileConfig

if TYPE_CHECKING:
    from ...options import Options

# Partial results are written and read: more splits cost more than they save.
_MOST_SPLITS = 128
# Default programs per multiprocessor, enough for its memory requests to overlap.
PROGRAMS_AT_ONCE = 2
# Most waves to try for a fuller last wave.
_MOST_WAVES = 4
# If every row is a program, one of so few blocks does not delay the others,
_FEW_BLOCKS = 16
# and with so many waves one of any length delays them little.
_MANY_WAVES = 8
# Rows aligned to 2 or 4 bytes are loaded in pieces of this size: registers hold all addresses of so
# few keys.
_SMALL_PIECES = 4
_KEYS_IN_SMALL_PIECES = 16
# Rows of a tile, except for chunks of a prompt.
_FEW_ROWS = 16
# Fewer keys take less time than the merge of their parts.
MANY_KEYS = 256
# Rows per program: of one head in forward, of all heads that share keys in a chunk.
_FORWARD_ROWS, _CHUNK_ROWS = 128, 64
# A chunk's row takes at most twice as long as forward's: 1.25 times by machine code, and on an H100
# Hopper's forward was measured 1.4 times as fast as the portable one.
_CHUNK_COST = 2
# The merge of a device full of chunks (20 MB written and read, and a launch) takes as long as a
# tile of forward for so many keys.
_MERGING_KEYS = 1024
# A merging program loads so many parts of a row at a time.
PARTS_AT_ONCE = 16
# The last program of a tile merges its rows one after another. Modelled: as many loads as this,
# each of 500 to 1000 clocks, take as long as a further launch, 2 to 4 us.
_LOADS_OF_A_LAUNCH = 8
# Queries and keys of calls that split keys on any device, with two batch rows and two heads that
# share keys: one with the tile of few rows, one with the tile of a chunk.
SPLIT_CALLS = ((1, MANY_KEYS), (16, 4096))


class KeySplit(NamedTuple):
    """The split of a call's keys.

    capacity: exclusive bound of key positions. parts: the most parts. plan: see `splits.Plan`;
    None: keys are not split, and each batch row is one part.
    """

    capacity: int
    parts: int
    plan: tuple[int, int] | None


def split_keys(
    q: Tensor, cache: CacheTensors, options: Options, tile: TileConfig, count: int | None
) -> KeySplit:
    """Split each row's keys into `count`; None: by the work of all rows."""
    capacity = _capacity(cache, options)
    B, H_q, T_q, _ = q.shape
    if options.batch_invariant:
        count = 1
    if count is not None:
        return KeySplit(capacity, B * count, (0, count) if count > 1 else None)
    H_k = cache.k.shape[1]
    heads = H_k * blocks(T_q * H_q // H_k, tile.BLOCK_M)
    visits = max(1, _visits(capacity, T_q, options, tile.BLOCK_N))
    shares = _shares(B, heads, visits, _at_once(q, cache))
    if shares is None and cache.lengths is not None:
        return KeySplit(capacity, B, None)
    shares = shares or B
    # A row may have one part more than its shares, but no empty part among several.
    return KeySplit(capacity, min(shares + B, B * visits), (shares, 0))


def _at_once(q: Tensor, cache: CacheTensors) -> int:
    """Programs that the device runs at once."""
    programs = tiles.programs_at_once(cache.k.element_size(), _widest(cache)) or PROGRAMS_AT_ONCE
    return programs * tiles.multiprocessors(q.device)


def merges_alone(B: int, rows: int, cache: CacheTensors, tile: TileConfig, split: KeySplit) -> bool:
    """Whether the last program of a tile to finish merges its parts, and no further launch.

    It has to be tuned (`tiles.one_launch`). B: batch rows; rows: the most rows of queries that
    share keys.
    """
    if split.plan is None or not tiles.one_launch(cache.k.element_size(), _widest(cache)):
        return False
    shares, splits = split.plan
    parts = splits or blocks(shares, B)
    loads = min(rows, tile.BLOCK_M) * blocks(parts, PARTS_AT_ONCE)
    # AMD's barrier does not wait for the stores of other waves, which the counter would announce.
    return loads <= _LOADS_OF_A_LAUNCH and not tiles.current_arch().startswith("gfx")


class PackedSplit(NamedTuple):
    """A launch for packed queries: rows of `fewest` to `most` tokens, and the split of keys.

    places: capacity for results of parts; 0: no tile is split.
    """

    tile: TileConfig
    split: KeySplit
    fewest: int
    most: int
    places: int


def split_packed(
    q: Tensor, B: int, longest: int, cache: CacheTensors, options: Options
) -> list[PackedSplit]:
    """The launches for B rows of packed queries q [1, H_q, total, D] with at most `longest` tokens.

    Only the device knows the tokens of a row. One launch serves rows that fit a tile of few rows,
    another the longer rows; each has programs for the most possible tiles. With batch_invariant,
    one launch serves all rows.

        H_q / H_k = 4, rows of 300, 1, 1, 0 and 1 tokens
            tiles of 16   at most one a row: 4 of 16 rows hold the token of 4 heads, three times
            tiles of 64   303 * 4 // 64 + 1 are enough: 19 hold 1200 rows
    """
    H_q, total = q.shape[1:3]
    G = H_q // cache.k.shape[1]
    few = 0 if options.batch_invariant else _FEW_ROWS // G
    groups = []
    if few:
        tile = decode_tile(q, cache, options, few=True)
        groups.append(_packed(q, cache, options, tile, (1, min(few, longest)), B, B))
    if longest > few:
        tile = decode_tile(q, cache, options, few=False)
        if options.registers in ("scores", "heavy") and not options.batch_invariant:
            # Tests or changes of each score take the registers of half of the keys.
            keys = max(16, tile.BLOCK_N // 2)
            tile = replace(tile, BLOCK_N=keys, sum_parts=min(tile.sum_parts, keys // 2))
        rows = min(B, total // (few + 1))
        most = total * G // tile.BLOCK_M + rows
        # At least so many tokens are in longer rows.
        least = max(1, (total - few * B) * G // tile.BLOCK_M)
        groups.append(_packed(q, cache, options, tile, (few + 1, longest), most, least))
    return groups


def _packed(
    q: Tensor,
    cache: CacheTensors,
    options: Options,
    tile: TileConfig,
    tokens: tuple[int, int],
    most: int,
    least: int,
) -> PackedSplit:
    """The launch for rows with numbers of tokens in a range, with `least` to `most` tiles."""
    capacity = _capacity(cache, options)
    of_tile = min(tokens[1], tile.BLOCK_M)
    visits = max(1, _visits(capacity, of_tile, options, tile.BLOCK_N))
    shares = _shares(least, cache.k.shape[1], visits, _at_once(q, cache))
    if shares is None or options.batch_invariant:
        # One share holds each row whole.
        return PackedSplit(tile, KeySplit(capacity, most, (1, 0)), *tokens, 0)
    # A tile is split only if each part takes more than half of a share.
    split = KeySplit(capacity, min(shares + most, most * visits), (shares, 0))
    return PackedSplit(tile, split, *tokens, min(2 * shares, most * visits))


def decode_tile(
    q: Tensor, cache: CacheTensors, options: Options, few: bool | None = None
) -> TileConfig:
    """The tile for a few rows or for a chunk of a prompt, with stages that depend on the cache.

    With batch_invariant, the forward's tile for both.
    """
    if options.batch_invariant:
        few = False
    if few is None:
        few = q.shape[2] * q.shape[1] // cache.k.shape[1] <= _FEW_ROWS
    kernel, widest = "decode" if few else "decode_chunk", _widest(cache)
    calls: Literal["shared", "codes", "plain"] = "plain"
    if cache.shared and widest > 256:  # values that are keys leave room for more keys
        calls = "shared"
    elif cache.k_scale is not None and cache.block_table is not None:
        calls = "codes"
    # No forward serves latents.
    invariant = options.batch_invariant and not cache.shared
    tile = tiles.lookup(kernel, q.element_size(), widest, calls, invariant)
    if cache.v_scale is not None and widest > 256:  # codes and wide accumulators fill registers
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, 32), BLOCK_N=min(tile.BLOCK_N, 32))
    if load_bytes(cache) <= _SMALL_PIECES and not options.batch_invariant:
        tile = replace(tile, BLOCK_N=min(tile.BLOCK_N, _KEYS_IN_SMALL_PIECES))
    tile = replace(tile, sum_parts=min(tile.sum_parts, tile.BLOCK_N // 2))
    # NVIDIA's pipeline halves the stages with a block table.
    deeper = cache.block_table is not None and tiles.current_arch().startswith("sm_")
    return replace(tile, num_stages=2 * tile.num_stages - 1) if deeper else tile


def load_bytes(cache: CacheTensors) -> int:
    """`row_bytes`, or 1 if codes cannot be loaded in pairs."""
    # In rows that are slices of longer ones, a pair may extend past either end.
    codes = [x for x, scale in zip(cache[:2], cache[2:4], strict=True) if scale is not None]
    if not all(x.shape[3] % 2 == 0 and x.data_ptr() % 16 == 0 for x in codes):
        return 1
    return row_bytes(cache)


def _widest(cache: CacheTensors) -> int:
    return max(block_dim(x.shape[3]) for x in (cache.k, cache.v))


def nvidia_capability() -> int:
    """The device's compute capability, such as 89; 0 if it is not NVIDIA's."""
    return _capability_of(tiles.current_arch())


@cache
def _capability_of(arch: str) -> int:
    return int(re.sub(r"\D", "", arch)) if arch.startswith("sm_") else 0


def in_one_page(cache: CacheTensors, BLOCK_N: int) -> bool:
    """Whether the slots of a block of positions are consecutive in one page."""
    if cache.block_table is None:
        return cache.keep_first is None
    return cache.k.shape[2] % BLOCK_N == 0


def row_alignment(q: Tensor) -> int:
    """Alignment of the rows in elements, at most 16 bytes."""
    elements = 16 // q.element_size()
    steps = zip(q.shape[:3], q.stride()[:3], strict=True)
    whole = all(size == 1 or stride % elements == 0 for size, stride in steps)
    return elements if whole and q.data_ptr() % 16 == 0 else 1


def _capacity(cache: CacheTensors, options: Options) -> int:
    """Bound of the positions of keys: the end of the cache, or of a tensor that they index."""
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


def why_not_split(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason that a call of attention does not split its keys among programs, or None.

    With one tile per head, most multiprocessors would be idle while each program visits all keys.
    A number in a reason would make it a constant of a trace.
    """
    if options.cu_seqlens_q is not None:
        return "sequences are packed"
    if options.batch_invariant:
        return "batch_invariant has all keys of a query in one program"
    rows, T_k = q.shape[2] * q.shape[1] // k.shape[1], k.shape[2]
    if T_k < MANY_KEYS:
        return f"there are fewer than {MANY_KEYS} keys"
    if rows > _FEW_ROWS and not _chunk_pays(q, k, options):
        return "there are too many queries per K/V head to split its keys"
    if options.dropout:
        return "its kernel does not support dropout"
    if options.fp32_results:
        return "its kernel rounds o to the dtype of q"
    if options.q_positions is not None:
        return "its kernel does not support positions"
    if options.relative_keys is not None:
        return "its kernel does not support relative_keys"
    if options.key2 is not None:
        return "its kernel does not support key2"
    if index_type(k, v).primitive_bitwidth > 32:
        return "keys are too far apart in memory"
    return None


def _chunk_pays(q: Tensor, k: Tensor, options: Options) -> bool:
    """Whether few queries with many keys are faster as a chunk of a prompt.

    Forward has a program for each tile of one head. A chunk's tiles have the rows of all G heads,
    and keys are split until the device is full:

        T_q = 64, H_q = 32, H_k = 8, B = 1        forward: 32 programs, each half full, all keys
                                                  chunk: 32 tiles of 64 rows, in as many parts as
                                                  there is room for

    Times are in rows per multiprocessor, each with all keys.
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
    """Number of shares for the keys of B rows; None: no row need be split.

    heads: programs with the same keys to split. visits: the most key blocks of a row. at_once:
    programs that the device runs at once.
    """
    count = _split_count(B * heads, visits, at_once)
    if count == 1 and (visits <= _FEW_BLOCKS or B * heads >= _MANY_WAVES * at_once):
        return None
    return B * count


def _split_count(programs: int, visits: int, at_once: int) -> int:
    """The smallest number of splits of equal rows that keeps the device about as busy as any."""
    most = min(visits // FEWEST_BLOCKS.value, blocks(_MOST_WAVES * at_once, programs))
    most = max(1, min(most, _MOST_SPLITS))
    # The number with evenly divided blocks: a further split would have none.
    counts = [n for n in range(1, most + 1) if blocks(visits, blocks(visits, n)) == n]

    def busy(splits: int) -> float:
        waves = programs * splits / at_once
        return waves / -(-programs * splits // at_once)

    best = max(map(busy, counts))
    return next(n for n in counts if busy(n) >= 0.85 * best)
