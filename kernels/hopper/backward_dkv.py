"""dK and dV for Hopper: two consumers of 64 keys each keep them in registers, queries stream by.

Transposed, keys down and queries across, so that P^T and dS^T are the register operands of dV and
dK and nothing but K, V, Q and dO passes through shared memory. The G query heads of a K/V head are
met by one program, one after the other: sums in registers, in a fixed order, no atomics.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..mask import batch_row, full_block, masked_block
from ..score import gradient, modified
from ..softmax import weights
from .band import block_number, plan_of_keys, sees
from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_ring,
    as_operand,
    load,
    load_slot,
    locate,
    number_of_tiles,
    release,
    release_slot,
    tile_number,
    tile_of,
    wait_full,
    wait_slot,
)


@gluon.jit
def _tile_facts(i, work, BLOCK_M: gl.constexpr):
    """Of this program's i-th tile of 128 keys: h_k, first key, its batch row, its plan of blocks.

    The plan is that of the first query head, as of all others.
    """
    order, T_q, T_k, H_k, G, mask, _total = work
    tile, head = locate(tile_number(i), order, False)
    b = head // H_k
    h = head - b * H_k
    row = batch_row(b, T_q, T_k, mask)
    first = tile * (2 * ROWS)
    return h, first, row, plan_of_keys(tile, first, h * G, row, mask, 2 * ROWS, BLOCK_M)


@gluon.jit
def _produce(inputs, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Load K and V of each tile, then the blocks of queries of all its heads."""
    q_desc, k_desc, v_desc, do_desc, k_slots, v_slots, q_ring, do_ring, work = inputs
    _order, _T_q, _T_k, _H_k, G, mask, total = work
    n = 0
    for i in range(number_of_tiles(total)):
        h, first, batch, plan = _tile_facts(i, work, BLOCK_M)
        masked, blocks, at = plan
        b = batch.b
        for consumer in gl.static_range(2):
            load_slot(k_slots, i, k_desc, b, h, first, consumer)
        for consumer in gl.static_range(2):
            load_slot(v_slots, i, v_desc, b, h, first, consumer)
        for g in range(G):
            for j in range(blocks):
                row = block_number(j, masked, at, mask) * BLOCK_M
                load(q_ring, n, q_desc, b, h * G + g, row, STAGES)
                load(do_ring, n, do_desc, b, h * G + g, row, STAGES)
                n += 1


@gluon.jit
def _step(
    dk, dv, k, v, q_ring, do_ring, n, stats, row, keys, h, batch, mask, score,
    MASKED: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """dk += dS^T q and dv += P^T do of one block of queries, from row `row` on.

    A row past the last starts from -inf, so its weights are 0 and need no mask.
    """
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    minus_lse_ptr, minus_delta_ptr = stats
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    # Both products start from what their result needs subtracted, so that neither lse nor delta
    # has to be kept beside them. Keys that do not exist start elsewhere: were all rows plainly
    # equal they would be copied from one another between the products, and ptxas would wait there.
    elsewhere = gl.where(keys < batch.end, 0.0, 1.0)[:, None]
    minus_lse = gl.load(minus_lse_ptr + rows)[None, :]
    s_start = elsewhere + minus_lse
    dp_start = elsewhere + gl.load(minus_delta_ptr + rows)[None, :]
    lse = 0.0
    if score.softcap is not None:
        # What a capped score needs subtracted cannot be subtracted before.
        lse = minus_lse * -score.scale

    wait_full(q_ring, n, True, STAGES)
    q = tile_of(q_ring, n, BLOCK_M, D, STAGES)
    s = warpgroup_mma(
        k, q.permute((1, 0)), s_start, use_acc=score.softcap is None, is_async=True
    )  # fmt: skip
    wait_full(do_ring, n, True, STAGES)
    do = tile_of(do_ring, n, BLOCK_M, D, STAGES)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp_start, is_async=True)

    s = warpgroup_mma_wait(1, deps=[s])
    rows = rows[None, :]
    keys = keys[:, None]
    s, factor, before, capped = modified(s, rows, keys, h, batch, score)
    p = weights(s, lse, factor)
    if MASKED:
        p = gl.where(sees(rows, keys, h, batch, mask), p, 0.0)
    dv = warpgroup_mma(as_operand(p, dtype, D), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    _dbias, ds = gradient(p * dp, before, capped, rows, keys, h, batch, None, score)
    dk = warpgroup_mma(as_operand(ds, dtype, D), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv])
    release(do_ring, n, STAGES)
    dk = warpgroup_mma_wait(0, deps=[dk])
    release(q_ring, n, STAGES)
    return dk, dv


@gluon.jit
def _store(desc, slots, x, b, h, first, CONSUMER: gl.constexpr, D: gl.constexpr):
    """x [64, D] to global memory, through the slot of the keys it belongs to."""
    tile = slots[0].index(CONSUMER)
    tile.reshape([ROWS, D]).store(x.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [b, h, first, 0], tile)


@gluon.jit
def _consume(
    outputs, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc, k_slots, v_slots, q_ring, do_ring, stats, score, work = outputs
    _order, _T_q, _T_k, H_k, G, mask, total = work
    minus_lse_ptr, minus_delta_ptr, stats_stride = stats
    LAYOUT: gl.constexpr = accumulator_layout(D)
    dtype: gl.constexpr = dk_desc.dtype
    k = k_slots[0].index(CONSUMER).reshape([ROWS, D])
    v = v_slots[0].index(CONSUMER).reshape([ROWS, D])
    n = 0
    for i in range(number_of_tiles(total)):
        h, first, batch, plan = _tile_facts(i, work, BLOCK_M)
        masked, blocks, at = plan
        b = batch.b
        first += CONSUMER * ROWS
        keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(BLOCK_M)))
        dk = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        wait_slot(k_slots, i, CONSUMER)
        wait_slot(v_slots, i, CONSUMER)
        for g in range(G):
            row_of_stats = ((b * H_k + h) * G + g).to(gl.int64) * stats_stride
            head_stats = (minus_lse_ptr + row_of_stats, minus_delta_ptr + row_of_stats)
            for j in range(masked):
                row = masked_block(j, at, mask) * BLOCK_M
                dk, dv = _step(
                    dk, dv, k, v, q_ring, do_ring, n + j, head_stats, row, keys, h * G + g,
                    batch, mask, score, True, BLOCK_M, D, STAGES, dtype,
                )  # fmt: skip
            for j in range(blocks - masked):
                row = full_block(j, at, mask) * BLOCK_M
                dk, dv = _step(
                    dk, dv, k, v, q_ring, do_ring, n + masked + j, head_stats, row, keys, h * G + g,
                    batch, mask, score, False, BLOCK_M, D, STAGES, dtype,
                )  # fmt: skip
            n += blocks

        # The weights of keys that no query may see were never masked: they end here.
        exists = (first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) < batch.end)[:, None]
        _store(dk_desc, k_slots, gl.where(exists, dk * score.scale, 0.0), b, h, first, CONSUMER, D)
        _store(dv_desc, v_slots, gl.where(exists, dv, 0.0), b, h, first, CONSUMER, D)
        tma.store_wait(pendings=0)
        release_slot(k_slots, CONSUMER)
        release_slot(v_slots, CONSUMER)


@gluon.jit(do_not_specialize=[
    "stats_stride", "T_q", "T_k", "H_k", "G", "total", "heads", "tiles", "group", "group_tiles",
])  # fmt: skip
def hopper_backward_dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, minus_lse_ptr, minus_delta_ptr,
    stats_stride, mask, score,
    T_q, T_k, H_k, G, total, heads, tiles, group, group_tiles,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 128 keys of each K/V head.

    minus_lse, minus_delta: rows of stats_stride numbers, a head each, of `backward_dq`.
    """
    k_slots = allocate_ring(k_desc, 2, 1)
    v_slots = allocate_ring(v_desc, 2, 1)
    q_ring = allocate_ring(q_desc, STAGES, 2)
    do_ring = allocate_ring(do_desc, STAGES, 2)
    work = ((heads, tiles, group, group_tiles), T_q, T_k, H_k, G, mask, total)
    inputs = (q_desc, k_desc, v_desc, do_desc, k_slots, v_slots, q_ring, do_ring, work)
    stats = (minus_lse_ptr, minus_delta_ptr, stats_stride)
    outputs = (dk_desc, dv_desc, k_slots, v_slots, q_ring, do_ring, stats, score, work)
    gl.warp_specialize([
        (_consume, (outputs, 0, BLOCK_M, D, STAGES)),
        (_consume, (outputs, 1, BLOCK_M, D, STAGES)),
        (_produce, (inputs, BLOCK_M, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
