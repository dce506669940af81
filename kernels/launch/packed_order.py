"""Order of the tiles of packed sequences, longest first, computed on the device.

A head has `slots` slots for tiles (`kernels.rules.tile.sequence_of`). The table holds them by
descending number of blocks, followed by the number of heads to interleave: as many as fit their
longest sequence in L2. `hopper.schedule.assign` assigns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rules.integers import value
from ..rules.mask import Mask
from ..rules.plans import key_plan, query_plan
from ..rules.tile import batch_row, sequence_of
from .arguments import blocks
from .block_sparsity import CallTables
from .launches import Launch

if TYPE_CHECKING:
    from ...options import Options

_BLOCK = 64


@triton.jit(do_not_specialize=["T_q", "T_k"])
def packed_costs_kernel(
    mask, costs_ptr, T_q, T_k, TILE: tl.constexpr, BLOCK: tl.constexpr, TILES_OF_KEYS: tl.constexpr
):
    """Cost of a slot's tile: its number of visible blocks plus 1, or 0 where there is no tile."""
    slot = tl.program_id(0)
    cu_ptr = mask.cu_k_ptr if TILES_OF_KEYS else mask.cu_q_ptr
    b, tile = sequence_of(slot, cu_ptr, value(mask.sequences), TILE)
    row = batch_row(b, T_q, T_k, mask)
    first = tile * TILE
    if TILES_OF_KEYS:
        last = tl.minimum(first + TILE, row.end) - 1
        full, boundary, _ = query_plan(tile, first, last, 0, row, mask, BLOCK)
        exists = first < row.T_k
    else:
        last = tl.minimum(first + TILE, row.T_q) - 1
        full, boundary, _ = key_plan(tile, first, last, 0, row, mask, BLOCK)
        exists = first < row.T_q
    tl.store(costs_ptr + slot, tl.where(exists, full + boundary + 1, 0))


@triton.jit(do_not_specialize=["slots", "rows_in_l2", "shared_by", "times"])
def packed_order_kernel(
    mask, costs_ptr, order_ptr, slots, rows_in_l2, shared_by, times,
    TILES_OF_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots by descending cost (stable), followed by the group of heads.

    rows_in_l2 / (rows of the longest sequence * shared_by) * times heads are a group.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cost = tl.load(costs_ptr + own, mask=own < slots, other=0)[:, None]
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, slots, BLOCK):
        other = (begin + tl.arange(0, BLOCK))[None, :]
        theirs = tl.load(costs_ptr + other, mask=other < slots, other=-1)
        before = (theirs > cost) | ((theirs == cost) & (other < own[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(order_ptr + rank, own, mask=own < slots)
    if tl.program_id(0) == 0:
        cu_ptr = mask.cu_q_ptr if TILES_OF_KEYS else mask.cu_k_ptr
        sequences = value(mask.sequences)
        longest = 1
        for begin in range(0, sequences, BLOCK):
            b = begin + tl.arange(0, BLOCK)
            ends = tl.load(cu_ptr + b + 1, mask=b < sequences, other=0)
            starts = tl.load(cu_ptr + b, mask=b < sequences, other=0)
            longest = tl.maximum(longest, tl.max((ends - starts).to(tl.int32)))
        group = tl.maximum(rows_in_l2 // longest // shared_by, 1) * times
        tl.store(order_ptr + slots, group)


def order_of_tiles(
    options: Options, mask: Mask, q: Tensor, k: Tensor, slots: int, shape: tuple[int, int],
    rows_in_l2: int, *, tiles_of_keys: bool,
) -> tuple[Tensor, CallTables | None]:  # fmt: skip
    """The table of a launch, int32 [slots + 1], and the launch that fills it for each call; None:
    it is constant.

    Args:
        shape: rows of a tile, and of its blocks.
        rows_in_l2: rows of two tensors like q or k, of one head, that fit in L2.
        tiles_of_keys: whether tiles are of keys, with blocks of queries.
    """
    costs, order = (q.new_empty(n, dtype=torch.int32) for n in (slots, slots + 1))
    G = q.shape[1] // k.shape[1]
    # All heads of a K/V head share its rows; a tile of keys reads all its heads' queries.
    shared_by, times = (G, 1) if tiles_of_keys else (1, G)
    of_costs = (mask, costs, q.shape[2], k.shape[2], *shape, tiles_of_keys)
    of_order = (mask, costs, order, slots, rows_in_l2, shared_by, times, tiles_of_keys, _BLOCK)
    fills = (
        Launch(packed_costs_kernel, slots, {"num_warps": 1}, *of_costs),
        Launch(packed_order_kernel, blocks(slots, _BLOCK), {"num_warps": 4}, *of_order),
    )
    if not options.launched_anew:
        return order, CallTables((order, costs), [(fill, ()) for fill in fills])
    for fill in fills:
        fill(())
    return order, None
