"""dQ for Hopper: two consumers of 64 queries each, K and V stream by.

The scores as in forward, then dS as the register operand of dS K. The lse and delta of each row are
written as dK/dV takes them.
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
from ..number import value
from ..score import gradient, modified
from ..softmax import weights
from .band import block_number, plan_of_queries, sees
from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_barriers,
    allocate_ring,
    as_operand,
    load_keys,
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
def _tile_facts(i, work, BLOCK_N: gl.constexpr):
    """Of this program's i-th tile of 128 queries: h, first query, its batch row, its plan."""
    order, T_q, T_k, H_q, _G, mask, _total = work
    tile, head = locate(tile_number(i), order, True)
    b = head // H_q
    h = head - b * H_q
    row = batch_row(b, T_q, T_k, mask)
    first = tile * (2 * ROWS)
    return h, first, row, plan_of_queries(tile, first, h, row, mask, 2 * ROWS, BLOCK_N)


@gluon.jit
def _produce(inputs, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load Q and dO of each tile, then its K and V blocks."""
    q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, work = inputs
    _order, _T_q, _T_k, _H_q, G, mask, total = work
    n = 0
    scrubs = 0
    for i in range(number_of_tiles(total)):
        h, first, row, plan = _tile_facts(i, work, BLOCK_N)
        masked, blocks, at = plan
        b = row.b
        for consumer in gl.static_range(2):
            load_slot(q_slots, i, q_desc, b, h, first, consumer)
            load_slot(do_slots, i, do_desc, b, h, first, consumer)
        for j in range(blocks):
            key = block_number(j, masked, at, mask) * BLOCK_N
            scrubs = load_keys(
                k_ring, n, k_desc, b, h // G, key, row.end, landed, scrubs,
                BLOCK_N, D, STAGES, mask.lengths_ptr is not None,
            )  # fmt: skip
            scrubs = load_keys(
                v_ring, n, v_desc, b, h // G, key, row.end, landed, scrubs,
                BLOCK_N, D, STAGES, mask.lengths_ptr is not None,
            )  # fmt: skip
            n += 1


@gluon.jit
def _step(
    dq, q, do, lse, delta, k_ring, v_ring, n, more, rows, key, h, row, mask, score,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """dq += dS k of one block of keys, from key `key` on."""
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    k = tile_of(k_ring, n, BLOCK_N, D, STAGES)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_full(v_ring, n, True, STAGES)
    v = tile_of(v_ring, n, BLOCK_N, D, STAGES)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    rows = rows[:, None]
    keys = (key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    s, factor, before, capped = modified(s, rows, keys, h, row, score)
    p = weights(s, lse[:, None], factor)
    if MASKED:
        p = gl.where(sees(rows, keys, h, row, mask), p, 0.0)
    # As in forward: without a branch here ptxas would wait for dO V^T before the exponentials.
    wait_full(k_ring, n + 1, more, STAGES)
    dp = warpgroup_mma_wait(0, deps=[dp])
    release(v_ring, n, STAGES)
    dx = p * (dp - delta[:, None])
    _dbias, ds = gradient(dx, before, capped, rows, keys, h, row, None, score)
    dq = warpgroup_mma(as_operand(ds, dtype, D), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    release(k_ring, n, STAGES)
    return dq


@gluon.jit
def _row_dot(o_ptr, stride, do, kept, D: gl.constexpr):
    """Sums of o * do over the columns; o from global memory, its first `kept` rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    pointers = o_ptr + (rows.to(gl.int64) * stride)[:, None] + cols[None, :]
    o = gl.load(pointers, mask=(rows < kept)[:, None], other=0.0)
    return gl.sum(o.to(gl.float32) * do.load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def _consume(
    outputs, CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """dQ and delta of 64 queries of each tile."""
    dq_desc, q_slots, do_slots, k_ring, v_ring, o_rows, stats, score, work = outputs
    o_ptr, o_strides = o_rows
    _order, T_q, _T_k, H_q, _G, mask, total = work
    lse_ptr, dlse_ptr, minus_lse_ptr, minus_delta_ptr, stats_stride = stats
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    dtype: gl.constexpr = dq_desc.dtype
    q_tile = q_slots[0].index(CONSUMER)
    q = q_tile.reshape([ROWS, D])
    do = do_slots[0].index(CONSUMER).reshape([ROWS, D])
    n = 0
    for i in range(number_of_tiles(total)):
        h, first, row, plan = _tile_facts(i, work, BLOCK_N)
        masked, blocks, at = plan
        b = row.b
        first += CONSUMER * ROWS
        rows = first + gl.arange(0, ROWS, layout=S_ROWS)
        of_head = (b * H_q + h).to(gl.int64) * T_q + rows
        lse = gl.load(lse_ptr + of_head, mask=rows < T_q, other=float("inf"))
        wait_slot(q_slots, i, CONSUMER)
        wait_slot(do_slots, i, CONSUMER)
        o_head = o_ptr + b.to(gl.int64) * value(o_strides[0])
        o_head += h.to(gl.int64) * value(o_strides[1])
        o_head += first.to(gl.int64) * value(o_strides[2])
        delta = _row_dot(o_head, value(o_strides[2]), do, T_q - first, D)
        delta = gl.convert_layout(delta, S_ROWS)
        if dlse_ptr is not None:
            delta -= gl.load(dlse_ptr + of_head, mask=rows < T_q, other=0.0)
        of_head = (b * H_q + h).to(gl.int64) * stats_stride + rows
        gl.store(minus_delta_ptr + of_head, -delta)
        gl.store(minus_lse_ptr + of_head, -lse / score.scale)

        dq = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
        wait_full(k_ring, n, True, STAGES)
        for j in range(masked):
            key = masked_block(j, at, mask) * BLOCK_N
            dq = _step(
                dq, q, do, lse, delta, k_ring, v_ring, n + j, j + 1 < blocks, rows, key,
                h, row, mask, score, True, BLOCK_N, D, STAGES, dtype,
            )  # fmt: skip
        for j in range(masked, blocks):
            key = full_block(j - masked, at, mask) * BLOCK_N
            dq = _step(
                dq, q, do, lse, delta, k_ring, v_ring, n + j, j + 1 < blocks, rows, key,
                h, row, mask, score, False, BLOCK_N, D, STAGES, dtype,
            )  # fmt: skip
        n += blocks

        release_slot(do_slots, CONSUMER)
        q.store((dq * score.scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [b, h, first, 0], q_tile)
        tma.store_wait(pendings=0)
        release_slot(q_slots, CONSUMER)


@gluon.jit(do_not_specialize=[
    "stats_stride", "T_q", "T_k", "H_q", "G", "total", "heads", "tiles", "group", "group_tiles",
])  # fmt: skip
def hopper_backward_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, o_ptr, o_strides, lse_ptr, dlse_ptr,
    minus_lse_ptr, minus_delta_ptr, stats_stride, mask, score,
    T_q, T_k, H_q, G, total, heads, tiles, group, group_tiles,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 128 queries of each head.

    Writes beside dQ what the scores and dP of each row start from in dK/dV: minus_lse = -lse /
    scale and minus_delta, heads stats_stride apart and whole tiles, -inf and 0 past the last row.
    """
    q_slots = allocate_ring(q_desc, 2, 1)
    do_slots = allocate_ring(do_desc, 2, 1)
    k_ring = allocate_ring(k_desc, STAGES, 2)
    v_ring = allocate_ring(v_desc, STAGES, 2)
    landed = allocate_barriers(1, 1).index(0)  # see load_keys
    work = ((heads, tiles, group, group_tiles), T_q, T_k, H_q, G, mask, total)
    inputs = (q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, work)
    stats = (lse_ptr, dlse_ptr, minus_lse_ptr, minus_delta_ptr, stats_stride)
    outputs = (
        dq_desc, q_slots, do_slots, k_ring, v_ring, (o_ptr, o_strides), stats, score, work,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (outputs, 0, BLOCK_N, D, STAGES)),
        (_consume, (outputs, 1, BLOCK_N, D, STAGES)),
        (_produce, (inputs, BLOCK_N, D, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
