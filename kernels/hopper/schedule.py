"""Schedule of the persistent grid: tiles of a program, and their blocks.

A tile's blocks are those of `kernels.rules.plans`. Boundary blocks, which are masked, come first,
so that the loop over full blocks has no mask.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..rules.integers import value
from ..rules.plans import full_block, key_plan, masked_block, query_plan
from ..rules.tile import at_keys, at_queries, batch_row, first_slot, memory_rows, sequence_of
from .pipeline import ROWS


class Work(NamedTuple):
    """All tiles of a launch, from arguments of every kernel.

    T_q, T_k: rows of q and k. H: heads of a batch row, query heads or, for tiles of keys, K/V
    heads. G: query heads that share a K/V head. heads: of all batch rows, times the parts. tiles:
    per head. pairs, pair_group, group: see `assign`. order_ptr: see `launch.packed_order`; None:
    by number. parts: of each tile of keys, see `heads_of_part`; None = one.
    """

    heads: Any
    tiles: Any
    group: Any
    pairs: Any
    T_q: Any
    T_k: Any
    H: Any
    mask: Any
    pair_group: Any
    G: Any
    order_ptr: Any
    parts: Any = None


# Integer arguments that do not specialise.
SIZES = ["stats_stride", *(x for x in Work._fields if x not in ("mask", "order_ptr"))]


class RowStats(NamedTuple):
    """-lse / scale and -delta of each query, fp32, the initial accumulators of S^T and dP^T in
    dK/dV.

    A head has `stride` numbers, in whole tiles (`first_slot`), padded with -inf and 0.
    """

    minus_lse_ptr: Any
    minus_delta_ptr: Any
    stride: Any


class Tile(NamedTuple):
    """A tile of head h of a batch row, and its blocks.

    first: number of its first query (or key) of the `length` that the batch row has. row: the
    `BatchRow`. b, first_q, first_k: where the batch row begins in memory. boundary, blocks, plan:
    number of boundary blocks, of all blocks, and where they are. Of keys, h counts the
    parts of all K/V heads, see `heads_of_part`.
    """

    h: Any
    first: Any
    length: Any
    row: Any
    b: Any
    first_q: Any
    first_k: Any
    boundary: Any
    blocks: Any
    plan: Any


@gluon.jit
def _pair_rounds(work):
    """Number of pairs of tiles of unlike length for each program; see `assign`."""
    return gl.cdiv(work.pairs * work.tiles, gl.num_programs(0))


@gluon.jit
def number_of_tiles(work):
    """Number of tiles for this program of a persistent grid; see `assign`."""
    programs = gl.num_programs(0)
    paired = 2 * _pair_rounds(work)
    alone = work.heads * work.tiles - paired * programs
    rounds = alone // programs
    return paired + rounds + gl.where(_turn(rounds) < alone - rounds * programs, 1, 0)


@gluon.jit
def _turn(n):
    """Rank of this program in the n-th round: the order of programs alternates."""
    program = gl.program_id(0)
    return gl.where(n % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def assign(i, work):
    """(rank, head) of this program's i-th tile: rank 0 is the longest tile of its head.

    The first 2 * `pairs` heads are assigned two tiles at a time, rank k of one head and the k-th
    last of its neighbour: if lengths fall linearly with the rank, as with a causal mask, all pairs
    are equally long. An incomplete round of pairs is filled from the middle of the other heads'
    tiles. The rest of those is assigned longest first, in alternating order. Heads are taken in
    groups: `pair_group` pairs of heads, or `group` of the others.

        tiles of this program:   i =   0 1   2 3   4 5   6   7   8 ...
        rounds of pairs:              [a A] [b B] [m M]              a, b long, A, B short
        one by one:                                       c   d   e
        the others' numbers:     0 = longest .. c .. | m .. M | .. d .. e ..
    """
    tiles = work.tiles
    programs = gl.num_programs(0)
    paired = work.pairs * tiles
    rounds = _pair_rounds(work)
    missing = rounds * programs - paired
    middle = (work.heads * tiles - 2 * paired) // 2 - missing
    unit = i // 2 * programs + gl.program_id(0)
    second = i % 2
    turn = (i - 2 * rounds) * programs + _turn(i)
    alone = turn + gl.where(turn < middle, 0, 2 * missing)
    past = unit - paired
    filler = middle + gl.where(second == 0, past, 2 * missing - 1 - past)
    other = gl.where(i < 2 * rounds, filler, alone)
    in_pairs = unit < paired
    number = gl.where(in_pairs, unit, other)
    heads = gl.where(in_pairs, work.pairs, work.heads - 2 * work.pairs)
    group = gl.where(in_pairs, work.pair_group, work.group)
    if work.order_ptr is not None:
        group = gl.minimum(gl.load(work.order_ptr + tiles), heads)
    rank, place = _in_group(number, heads, group, tiles)
    if work.order_ptr is not None:
        # Alternating direction, so that a program does not always get the same side of a group; the
        # last group is descending.
        behind = (heads - 1) // group - place // group
        rank = gl.where(behind % 2 == 0, rank, tiles - 1 - rank)
    neighbour = gl.where(2 * rank < tiles, second, 1 - second)
    rank = gl.where(in_pairs & (neighbour != 0), tiles - 1 - rank, rank)
    head = gl.where(in_pairs, 2 * place + neighbour, 2 * work.pairs + place)
    return rank, head


@gluon.jit
def _in_group(number, heads, group, tiles):
    """(rank, head) of a number: a group's heads finish a rank before the next one."""
    first_head = number // (group * tiles) * group
    rest = number - first_head * tiles
    heads_here = gl.minimum(group, heads - first_head)
    rank = rest // heads_here
    return rank, first_head + rest - rank * heads_here


@gluon.jit
def _of_head(i, work, H, cu_ptr, TILE: gl.constexpr, LAST_FIRST: gl.constexpr):
    """(tile, b, h) of this program's i-th tile, with H heads per batch row.

    LAST_FIRST: the last tiles are the longest. Packed sequences have slots of TILE rows
    (`kernels.rules.tile.sequence_of`), some past the end of their sequence.
    """
    tile, head = assign(i, work)
    if work.order_ptr is not None:
        tile = gl.load(work.order_ptr + tile)
    elif LAST_FIRST:
        tile = work.tiles - 1 - tile
    b = head // H
    h = head - b * H
    if cu_ptr is not None:
        b, tile = sequence_of(tile, cu_ptr, value(work.mask.sequences), TILE)
    return tile, b, h


@gluon.jit
def plan_of_queries(tile, first, h, row, mask, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key blocks of the TILE queries from `first` on: (boundary blocks, all blocks, plan).

    At least one, masked if necessary, as a tile without keys still writes its output.
    """
    last = gl.minimum(first + TILE, row.T_q) - 1
    full, boundary, plan = key_plan(tile, first, last, h, row, mask, BLOCK_N)
    boundary = gl.where(full + boundary > 0, boundary, 1)
    return boundary, full + boundary, plan


@gluon.jit
def plan_of_keys(tile, first, h, row, mask, TILE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Query blocks of the TILE keys from `first` on, as `plan_of_queries` but possibly none."""
    last = gl.minimum(first + TILE, row.end) - 1
    if mask.extents_ptr is not None:
        first = gl.maximum(first, row.start)
    full, boundary, plan = query_plan(tile, first, last, h, row, mask, BLOCK_M)
    blocks = full + boundary
    if mask.extents_ptr is not None:
        # Only hidden keys: nothing to compute.
        boundary, blocks = gl.where(first > last, 0, boundary), gl.where(first > last, 0, blocks)
    return boundary, blocks, plan


@gluon.jit
def block_number(i, tile, mask):
    """Number of a tile's i-th block."""
    boundary = tile.boundary
    if mask.blocks_ptr is not None:
        # Both are loads, even if invalid.
        if i < boundary:
            block = masked_block(i, tile.plan, mask)
        else:
            block = full_block(i - boundary, tile.plan, mask)
    else:
        block = gl.where(
            i < boundary,
            masked_block(i, tile.plan, mask),
            full_block(i - boundary, tile.plan, mask),
        )
    return block


@gluon.jit
def query_tile(i, work, config: gl.constexpr):
    """This program's i-th tile of queries, maybe past the end of a packed sequence."""
    TILE: gl.constexpr = ROWS * config.CONSUMERS
    mask = work.mask
    tile, b, h = _of_head(i, work, work.H, mask.cu_q_ptr, TILE, True)
    first = tile * TILE
    row = at_queries(batch_row(b, work.T_q, work.T_k, mask), first, mask)
    boundary, blocks, plan = plan_of_queries(tile, first, h, row, mask, TILE, config.BLOCK)
    batch, first_q, first_k = memory_rows(b, work.T_q, work.T_k, mask)
    return Tile(h, first, row.T_q, row, batch, first_q, first_k, boundary, blocks, plan)


@gluon.jit
def key_tile(i, work, config: gl.constexpr):
    """This program's i-th tile of keys, as `query_tile`; parts are scheduled like K/V heads.

    The plan is the first query head's, equal for all G.
    """
    TILE: gl.constexpr = ROWS * config.CONSUMERS
    mask = work.mask
    H = work.H
    if work.parts is not None:
        H *= work.parts
    tile, b, h = _of_head(i, work, H, mask.cu_k_ptr, TILE, False)
    first = tile * TILE
    row = at_keys(batch_row(b, work.T_q, work.T_k, mask), first, mask)
    head = kv_head(h, work) * work.G
    boundary, blocks, plan = plan_of_keys(tile, first, head, row, mask, TILE, config.BLOCK)
    batch, first_q, first_k = memory_rows(b, work.T_q, work.T_k, mask)
    return Tile(h, first, row.T_k, row, batch, first_q, first_k, boundary, blocks, plan)


@gluon.jit
def kv_head(h, work):
    """The K/V head of a `Tile` of keys."""
    if work.parts is not None:
        h = h // work.parts
    return h


@gluon.jit
def heads_of_part(tile, work):
    """(first, end) of the query heads of a K/V head for a tile of keys.

    With few K/V heads there are few such tiles, so several programs share one: each takes a part of
    the blocks of all G heads, head by head, balanced to within one block.
    """
    first_g = 0
    end_g = work.G
    if work.parts is not None:
        first, end = _part(tile, work)
        blocks = gl.maximum(tile.blocks, 1)
        first_g = first // blocks
        end_g = gl.cdiv(end, blocks)
    return first_g, end_g


@gluon.jit
def _part(tile, work):
    """(first, end) of a part's blocks among the blocks of all heads."""
    part = tile.h % work.parts
    blocks = tile.blocks * work.G
    number = blocks // work.parts
    more = blocks - number * work.parts
    first = part * number + gl.minimum(part, more)
    return first, first + number + gl.where(part < more, 1, 0)


@gluon.jit
def blocks_of_part(g, tile, work):
    """(first, end) of a part's blocks of the g-th head."""
    begin = 0
    stop = tile.blocks
    if work.parts is not None:
        first, end = _part(tile, work)
        begin = gl.maximum(first - g * tile.blocks, 0)
        stop = gl.minimum(end - g * tile.blocks, stop)
    return begin, stop


@gluon.jit
def loops_of_part(begin, stop, tile, work):
    """(end of the boundary blocks, first and end of the full ones) among a tile's blocks."""
    boundary_end = tile.boundary
    full = 0
    if work.parts is not None:
        boundary_end = gl.minimum(boundary_end, stop)
        full = gl.maximum(begin - tile.boundary, 0)
    return boundary_end, full, stop - tile.boundary


@gluon.jit
def row_of_stats(tile, mask):
    """Index of query 0 of a tile's batch row in `RowStats`."""
    return first_slot(tile.row.b, tile.first_q, mask, 2 * ROWS)


@gluon.jit
def stats_of_head(stats, head, tile, mask):
    """Offset of query 0 of a tile's batch row in `RowStats`; head counts over all batch rows."""
    return head * stats.stride + row_of_stats(tile, mask)
