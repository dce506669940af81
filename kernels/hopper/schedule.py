"""Which tiles a program of a persistent grid works on, in which order, and where they lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..rules.integers import value
from ..rules.mask import batch_row, memory_rows
from ..rules.tile import sequence_of
from .band import plan_of_keys, plan_of_queries


@gluon.jit
def number_of_tiles(total):
    """How many of `total` tiles this program of a persistent grid works on; see `tile_number`."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    rounds = total // programs
    place_in_last = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (place_in_last < total - rounds * programs).to(gl.int32)


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
def locate(number, order, LAST_FIRST: gl.constexpr):
    """(tile, head) of a tile number; head counts on over the batch rows.

    order: all heads, tiles of each, heads in a group, tiles in a group. Heads are taken a group at
    a time, as many as keep their K and V in L2; inside of a group all heads do one tile before any
    does the next. LAST_FIRST: the last tiles are the longest ones.
    """
    heads, tiles, group, group_tiles = order
    first_head = number // group_tiles * group
    rest = number - first_head * tiles
    heads_here = gl.minimum(group, heads - first_head)
    tile = rest // heads_here
    head = first_head + rest - tile * heads_here
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head


@gluon.jit
def _of_head(i, order, H, cu_ptr, mask, TILE: gl.constexpr, LAST_FIRST: gl.constexpr):
    """(tile, b, h) of this program's i-th tile, of H heads a batch row.

    Packed sequences are slots of TILE rows (`kernels.rules.tile.sequence_of`), some of which lie
    past the end of their sequence.
    """
    tile, head = locate(tile_number(i), order, LAST_FIRST)
    b = head // H
    h = head - b * H
    if cu_ptr is not None:
        b, tile = sequence_of(tile, cu_ptr, value(mask.sequences), TILE)
    return tile, b, h


@gluon.jit
def query_tile(i, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """This program's i-th tile of TILE queries: (h, first query, batch row, memory, plan).

    memory: batch index, first query and first key of the batch row there. Of packed sequences the
    tile may lie past the end.
    """
    order, T_q, T_k, H_q, mask, _total = work
    tile, b, h = _of_head(i, order, H_q, mask.cu_q_ptr, mask, TILE, True)
    row = batch_row(b, T_q, T_k, mask)
    first = tile * TILE
    plan = plan_of_queries(tile, first, h, row, mask, TILE, BLOCK_N)
    return h, first, row, memory_rows(b, mask), plan


@gluon.jit
def key_tile(i, work, G, TILE: gl.constexpr, BLOCK_M: gl.constexpr):
    """This program's i-th tile of TILE keys, as `query_tile`; h is a K/V head.

    The plan is that of the first of its G query heads, as of all others.
    """
    order, T_q, T_k, H_k, mask, _total = work
    tile, b, h = _of_head(i, order, H_k, mask.cu_k_ptr, mask, TILE, False)
    row = batch_row(b, T_q, T_k, mask)
    first = tile * TILE
    plan = plan_of_keys(tile, first, h * G, row, mask, TILE, BLOCK_M)
    return h, first, row, memory_rows(b, mask), plan
