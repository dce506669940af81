"""The mask of `kernels.mask` as the Hopper kernels need it: ranges of blocks, and one tile's rule.

Key blocks are visited boundary blocks first: those are masked, and the loop over the full blocks
that follows holds no mask at all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..mask import batch_row, boundary_block, key_blocks, query_blocks, visible

# Farther than any side of a band (2^30 at most) from any position, and not too far for int32.
_OUT_OF_SIGHT = gl.constexpr(3 << 29)


@gluon.jit
def row_facts(b, T_k, query_offset, offsets_ptr, lengths_ptr):
    """Batch row b: the position of its query 0, and how many keys it has."""
    offset, _start, end, _solid = batch_row(b, T_k, query_offset, offsets_ptr, lengths_ptr, None)
    return offset, end


@gluon.jit
def key_plan(m_first, m_last, offset, end, left, right, BLOCK_N: gl.constexpr):
    """Key blocks that queries m_first..m_last visit: (how many, how many are masked, ranges).

    At least one, masked if need be: a tile that sees nothing still has an output to write.
    """
    lo, full_lo, full_hi, hi = key_blocks(
        m_first + offset, m_last + offset, 0, end, True, left, right, BLOCK_N
    )
    boundary = (full_lo - lo) + (hi - full_hi)
    number = gl.maximum(hi - lo, 1)
    return number, gl.where(hi > lo, boundary, 1), (lo, full_lo, full_hi)


@gluon.jit
def query_plan(k_first, k_last, offset, T_q, left, right, BLOCK_M: gl.constexpr):
    """Query blocks that keys k_first..k_last visit, as `key_plan` but possibly none."""
    lo, full_lo, full_hi, hi = query_blocks(k_first, k_last, offset, T_q, left, right, BLOCK_M)
    return hi - lo, (full_lo - lo) + (hi - full_hi), (lo, full_lo, full_hi)


@gluon.jit
def block_number(i, masked, ranges):
    """Number of the i-th block of a plan."""
    lo, full_lo, full_hi = ranges
    return gl.where(i < masked, boundary_block(i, lo, full_lo, full_hi), full_lo + i - masked)


@gluon.jit
def sees(rows, k_pos, offset, end, left, right):
    """True where query `rows` sees key k_pos; the two broadcast to the shape of a tile.

    A key past the end is moved out of sight of the band, a step a column, not one an element.
    """
    if right is None:
        keep = visible(rows + offset, k_pos, left, right) & (k_pos < end)
    else:
        keep = visible(rows + offset, gl.where(k_pos < end, k_pos, _OUT_OF_SIGHT), left, right)
    return keep
