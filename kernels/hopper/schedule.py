"""Order of tiles: which ones a program of the persistent grid works on, and where they lie."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..rules.integers import value
from ..rules.mask import batch_row, memory_rows
from ..rules.tile import first_slot, sequence_of
from .band import plan_of_keys, plan_of_queries
from .pipeline import ROWS


class Work(NamedTuple):
    """All tiles of a launch, from arguments of every kernel.

    T_q, T_k: rows of q and k. H: heads of a batch row, query heads or, for tiles of keys, K/V
    heads. G: query heads that share a K/V head. heads: those of all batch rows. tiles: of a head.
    group: heads whose K and V, or Q and dO, fit L2 together; group_tiles: theirs; total: of all.
    """

    heads: Any
    tiles: Any
    group: Any
    group_tiles: Any
    T_q: Any
    T_k: Any
    H: Any
    mask: Any
    total: Any
    G: Any


# Integers among the arguments: no new value compiles a kernel anew.
SIZES = ["stats_stride", *(name for name in Work._fields if name != "mask")]


class RowStats(NamedTuple):
    """-lse / scale and -delta of each query, fp32, from which S^T and dP^T start in dK/dV.

    A head has a row of `stride` numbers, in whole tiles (`first_slot`): -inf and 0 past the end.
    """

    minus_lse_ptr: Any
    minus_delta_ptr: Any
    stride: Any


class Tile(NamedTuple):
    """A tile of head h of a batch row, and the blocks that it meets.

    first: number of its first query (or key) of the `length` that the batch row has. row: the
    `mask.Row`. b, first_q, first_k: where the batch row begins in memory. boundary, blocks, plan:
    number of boundary blocks, of all blocks, and where they are; see `band`.
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
def number_of_tiles(work):
    """Number of tiles for this program of a persistent grid; see `tile_number`."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    rounds = work.total // programs
    turn_in_last = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (turn_in_last < work.total - rounds * programs).to(gl.int32)


@gluon.jit
def tile_number(i):
    """The i-th tile of this program: the order of programs is turned round after each.

    Tiles come longest first. Dealt in one direction the first program would get the longest of
    every round; this way it gets the longest of one and the shortest of the next.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return i * programs + gl.where(i % 2 == 0, program, programs - 1 - program)


@gluon.jit
def locate(number, work, LAST_FIRST: gl.constexpr):
    """(tile, head) of a tile number; head counts on over the batch rows.

    Heads are taken a group at a time, as many as keep their K and V in L2; inside of a group all
    heads do one tile before any does the next. LAST_FIRST: the last tiles are the longest ones.
    """
    first_head = number // work.group_tiles * work.group
    rest = number - first_head * work.tiles
    heads_here = gl.minimum(work.group, work.heads - first_head)
    tile = rest // heads_here
    head = first_head + rest - tile * heads_here
    if LAST_FIRST:
        tile = work.tiles - 1 - tile
    return tile, head


@gluon.jit
def _of_head(i, work, cu_ptr, TILE: gl.constexpr, LAST_FIRST: gl.constexpr):
    """(tile, b, h) of this program's i-th tile.

    Packed sequences are slots of TILE rows (`kernels.rules.tile.sequence_of`), some of which lie
    past the end of their sequence.
    """
    tile, head = locate(tile_number(i), work, LAST_FIRST)
    b = head // work.H
    h = head - b * work.H
    if cu_ptr is not None:
        b, tile = sequence_of(tile, cu_ptr, value(work.mask.sequences), TILE)
    return tile, b, h


@gluon.jit
def query_tile(i, work, config: gl.constexpr):
    """This program's i-th tile of queries. Of packed sequences it may lie past the end."""
    TILE: gl.constexpr = ROWS * config.CONSUMERS
    mask = work.mask
    tile, b, h = _of_head(i, work, mask.cu_q_ptr, TILE, True)
    row = batch_row(b, work.T_q, work.T_k, mask)
    first = tile * TILE
    boundary, blocks, plan = plan_of_queries(tile, first, h, row, mask, TILE, config.BLOCK)
    batch, first_q, first_k = memory_rows(b, mask)
    return Tile(h, first, row.T_q, row, batch, first_q, first_k, boundary, blocks, plan)


@gluon.jit
def key_tile(i, work, config: gl.constexpr):
    """This program's i-th tile of keys, as `query_tile`; h is a K/V head.

    The plan is that of the first of its G query heads, as of all others.
    """
    TILE: gl.constexpr = ROWS * config.CONSUMERS
    mask = work.mask
    tile, b, h = _of_head(i, work, mask.cu_k_ptr, TILE, False)
    row = batch_row(b, work.T_q, work.T_k, mask)
    first = tile * TILE
    boundary, blocks, plan = plan_of_keys(tile, first, h * work.G, row, mask, TILE, config.BLOCK)
    batch, first_q, first_k = memory_rows(b, mask)
    return Tile(h, first, row.T_k, row, batch, first_q, first_k, boundary, blocks, plan)


@gluon.jit
def row_of_stats(tile, mask):
    """Number of query 0 of a tile's batch row in the vectors of `RowStats`."""
    return first_slot(tile.row.b, tile.first_q, mask, 2 * ROWS)


@gluon.jit
def stats_of_head(stats, head, tile, mask):
    """Offset of query 0 of a tile's batch row in `RowStats`; head counts on over the batch rows."""
    return head * stats.stride + row_of_stats(tile, mask)
