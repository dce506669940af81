"""Which blocks a tile of the Hopper kernels meets: `kernels.rules.plans`, in their order.

Boundary blocks come first: those are masked, and the loop over the full blocks that follows holds
no mask at all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..rules.plans import full_block, key_plan, masked_block, query_plan


@gluon.jit
def plan_of_queries(tile, first, h, row, mask, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key blocks of the TILE queries from `first` on: (boundary blocks, all blocks, plan).

    At least one, masked if need be: a tile that sees nothing still has an output to write.
    """
    last = gl.minimum(first + TILE, row.T_q) - 1
    full, boundary, plan = key_plan(tile, first, last, h, row, mask, BLOCK_N)
    boundary = gl.where(full + boundary > 0, boundary, 1)
    return boundary, full + boundary, plan


@gluon.jit
def plan_of_keys(tile, first, h, row, mask, TILE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Query blocks of the TILE keys from `first` on, as `plan_of_queries` but possibly none."""
    last = gl.minimum(first + TILE, row.end) - 1
    full, boundary, plan = query_plan(tile, first, last, h, row, mask, BLOCK_M)
    return boundary, full + boundary, plan


@gluon.jit
def block_number(i, tile, mask):
    """Number of the i-th block that a tile meets."""
    boundary = tile.boundary
    if mask.blocks_ptr is not None:
        # Both are loads: of what is not there, too.
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
