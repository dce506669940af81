"""dQ in one pass with dK and dV: consumers exchange dS^T in shared memory and sum dQ in global
memory.

A consumer holds dS^T of its 64 keys, but dQ sums over all 128, and two sums of 64 would double the
global traffic. So each consumer passes its dS^T to the other, and multiplies both with one half of
K's columns. That also halves the registers, to no more than the scores took.

    dQ[:, half] = dS_0 K_0[:, half] + dS_1 K_1[:, half]
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_barriers,
    async_atomic_add,
    stage_and_parity,
    wait_full,
)

# One consumer may be a block ahead of the other.
_STAGES = gl.constexpr(2)


class DsRing(NamedTuple):
    """A `Ring` of dS^T, filled by a consumer from its registers."""

    tiles: Any
    full: Any
    empty: Any


class DqSum(NamedTuple):
    """The sum of dQ, fp32 [B, H_q, whole tiles, D].

    tiles: in shared memory, one per consumer, from which TMA adds to desc. Both are None if the
    threads add to ptr.
    """

    tiles: Any
    desc: Any
    ptr: Any


@gluon.jit
def allocate_dq_tiles(desc):
    """The tiles of a `DqSum`."""
    SHAPE: gl.constexpr = [2, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def allocate_exchange(dtype: gl.constexpr, BLOCK_M: gl.constexpr):
    """A ring per consumer, which it fills and the other empties. dtype: of dS."""
    return _allocate_ring(dtype, BLOCK_M), _allocate_ring(dtype, BLOCK_M)


@gluon.jit
def _allocate_ring(dtype: gl.constexpr, BLOCK_M: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    tiles = gl.allocate_shared_memory(dtype, [_STAGES, ROWS, BLOCK_M], LAYOUT)
    return DsRing(tiles, allocate_barriers(_STAGES, 1), allocate_barriers(_STAGES, 1))


@gluon.jit
def at(tiles, NUMBER: gl.constexpr, n):
    """tiles.index(NUMBER), with its address recomputed in each block, as n < 2^30."""
    # The compiler would keep all addresses and product descriptors of a loop-invariant tile in
    # registers, which are too few.
    return tiles.index(NUMBER + (n >> 30))


@gluon.jit
def held(slots, NUMBER: gl.constexpr, n):
    """The tile of a consumer as a matrix in shared memory, at the n-th block."""
    D: gl.constexpr = slots.tiles.shape[4]
    if D == 64:
        # The accumulators leave enough registers.
        n = 0
    return at(slots.tiles, NUMBER, n).reshape([ROWS, D])


@gluon.jit
def share(exchange, n, ds, CONSUMER: gl.constexpr):
    """Share dS^T of the n-th block, after the other consumer has read the previous one."""
    ring = exchange[CONSUMER]
    stage, parity = stage_and_parity(ring, n)
    mbarrier.wait(ring.empty.index(stage), parity ^ 1)
    ring.tiles.index(stage).store(ds)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def start_dq(exchange, n, k_slots, CONSUMER: gl.constexpr):
    """Issue the two products for this consumer's columns of dQ of the n-th block."""
    OTHER: gl.constexpr = 1 - CONSUMER
    own, other = exchange[CONSUMER], exchange[OTHER]
    BLOCK_M: gl.constexpr = own.tiles.shape[2]
    HALF: gl.constexpr = k_slots.tiles.shape[4] // 2
    dq = gl.zeros([BLOCK_M, HALF], gl.float32, accumulator_layout(HALF))
    k = _columns(k_slots, CONSUMER, n, CONSUMER, HALF)
    dq = warpgroup_mma(_ds(own, n), k, dq, use_acc=False, is_async=True)
    # The other consumer has waited for its keys before sharing.
    wait_full(other, n)
    k = _columns(k_slots, OTHER, n, CONSUMER, HALF)
    return warpgroup_mma(_ds(other, n), k, dq, is_async=True)


@gluon.jit
def _ds(ring, n):
    """dS of the n-th block, from dS^T in shared memory."""
    stage, _parity = stage_and_parity(ring, n)
    return ring.tiles.index(stage).permute((1, 0))


@gluon.jit
def _columns(k_slots, NUMBER: gl.constexpr, n, PART: gl.constexpr, COLS: gl.constexpr):
    """K of consumer NUMBER, its columns from PART * COLS on."""
    return held(k_slots, NUMBER, n).slice(PART * COLS, COLS, 1)


@gluon.jit
def add_by_tma(dq_sum, n, dq, b, h, row, CONSUMER: gl.constexpr):
    """Add this consumer's columns of dQ of the n-th block to rows `row`... of head h."""
    BLOCK_M: gl.constexpr = dq.shape[0]
    HALF: gl.constexpr = dq.shape[1]
    tile = at(dq_sum.tiles, CONSUMER, n)
    # The previous block's addition is probably complete by now.
    tma.store_wait(pendings=0)
    tile.reshape([BLOCK_M, HALF]).store(dq)
    fence_async_shared()
    async_atomic_add(dq_sum.desc, [b, h, row, CONSUMER * HALF], tile)


@gluon.jit
def add_by_threads(dq_sum, dq, first, CONSUMER: gl.constexpr):
    """`add_by_tma` from the registers, to rows `first`... of all heads' together.

    Four adjacent threads add to a sector of 32 bytes. The row stride is the constant D, so that a
    thread needs one address and constant offsets.
    """
    BLOCK_M: gl.constexpr = dq.shape[0]
    HALF: gl.constexpr = dq.shape[1]
    LAYOUT: gl.constexpr = accumulator_layout(HALF)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    ptr = dq_sum.ptr + first * (2 * HALF) + CONSUMER * HALF
    gl.atomic_add(ptr + (rows[:, None] * (2 * HALF) + cols[None, :]), dq, sem="relaxed")


@gluon.jit
def wait_read(exchange, n, CONSUMER: gl.constexpr):
    """Wait until the other consumer has used what this one shared before the n-th block."""
    # Does not wait before the very first block.
    ring = exchange[CONSUMER]
    stage, parity = stage_and_parity(ring, n - 1)
    mbarrier.wait(ring.empty.index(stage), parity)
