"""dQ for Hopper, and the delta of each row: consumers of 64 queries, K and V stream by.

The scores, as in forward, then dS as the register operand of dS K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..softmax import weights
from .band import block_number, key_plan, row_facts, sees
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
def _tile_facts(i, order, problem, lengths, BLOCK_N: gl.constexpr):
    """Of this program's i-th tile of 128 queries: b, h, first query, offset, end, its plan."""
    T_q, T_k, H_q, G, query_offset, left, right = problem
    offsets_ptr, lengths_ptr = lengths
    tile, head = locate(tile_number(i), order, True)
    b = head // H_q
    first = tile * (2 * ROWS)
    last = gl.minimum(first + 2 * ROWS, T_q) - 1
    offset, end = row_facts(b, T_k, query_offset, offsets_ptr, lengths_ptr)
    blocks, masked, ranges = key_plan(first, last, offset, end, left, right, BLOCK_N)
    return b, head - b * H_q, first, offset, end, blocks, masked, ranges


@gluon.jit
def _produce(inputs, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load Q and dO of each tile, then its K and V blocks."""
    q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, work = inputs
    order, problem, lengths, total = work
    n = 0
    scrubs = 0
    for i in range(number_of_tiles(total)):
        b, h, first, _offset, end, blocks, masked, ranges = _tile_facts(
            i, order, problem, lengths, BLOCK_N
        )
        for consumer in gl.static_range(2):
            load_slot(q_slots, i, q_desc, b, h, first, consumer)
            load_slot(do_slots, i, do_desc, b, h, first, consumer)
        for j in range(blocks):
            key = block_number(j, masked, ranges) * BLOCK_N
            scrubs = load_keys(
                k_ring, n, k_desc, b, h // problem[3], key, end, landed, scrubs,
                BLOCK_N, D, STAGES, lengths[1] is not None,
            )  # fmt: skip
            scrubs = load_keys(
                v_ring, n, v_desc, b, h // problem[3], key, end, landed, scrubs,
                BLOCK_N, D, STAGES, lengths[1] is not None,
            )  # fmt: skip
            n += 1


@gluon.jit
def _step(
    dq, q, do, lse, delta, k_ring, v_ring, n, more, rows, key, offset, end, left, right,
    scale_log2,
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
    p = weights(s, lse[:, None], scale_log2)
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        keep = sees(rows[:, None], keys[None, :], offset, end, left, right)
        p = gl.where(keep, p, 0.0)
    # As in forward: without a branch here ptxas would wait for dO V^T before the exponentials.
    wait_full(k_ring, n + 1, more, STAGES)
    dp = warpgroup_mma_wait(0, deps=[dp])
    release(v_ring, n, STAGES)
    ds = p * (dp - delta[:, None])
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
    dq_desc, q_slots, do_slots, k_ring, v_ring, o_rows, stats, scales, work = outputs
    o_ptr, o_strides = o_rows
    scale, scale_log2 = scales
    order, problem, lengths, total = work
    lse_ptr, dlse_ptr, delta_ptr = stats
    T_q, _T_k, H_q, _G, _query_offset, left, right = problem
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    dtype: gl.constexpr = dq_desc.dtype
    q_tile = q_slots[0].index(CONSUMER)
    q = q_tile.reshape([ROWS, D])
    do = do_slots[0].index(CONSUMER).reshape([ROWS, D])
    n = 0
    for i in range(number_of_tiles(total)):
        b, h, first, offset, end, blocks, masked, ranges = _tile_facts(
            i, order, problem, lengths, BLOCK_N
        )
        first += CONSUMER * ROWS
        rows = first + gl.arange(0, ROWS, layout=S_ROWS)
        of_head = (b * H_q + h).to(gl.int64) * T_q + rows
        lse = gl.load(lse_ptr + of_head, mask=rows < T_q, other=float("inf"))
        wait_slot(q_slots, i, CONSUMER)
        wait_slot(do_slots, i, CONSUMER)
        o_head = o_ptr + b.to(gl.int64) * o_strides[0] + h.to(gl.int64) * o_strides[1]
        o_head += first.to(gl.int64) * o_strides[2]
        delta = _row_dot(o_head, o_strides[2], do, T_q - first, D)
        delta = gl.convert_layout(delta, S_ROWS)
        if dlse_ptr is not None:
            delta -= gl.load(dlse_ptr + of_head, mask=rows < T_q, other=0.0)
        gl.store(delta_ptr + of_head, delta, mask=rows < T_q)

        dq = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
        wait_full(k_ring, n, True, STAGES)
        for j in range(masked):
            key = block_number(j, masked, ranges) * BLOCK_N
            dq = _step(
                dq, q, do, lse, delta, k_ring, v_ring, n + j, j + 1 < blocks, rows, key, offset, end, left, right,
                scale_log2, True, BLOCK_N, D, STAGES, dtype,
            )  # fmt: skip
        for j in range(masked, blocks):
            dq = _step(
                dq, q, do, lse, delta, k_ring, v_ring, n + j, j + 1 < blocks, rows, 0, offset, end, left, right,
                scale_log2, False, BLOCK_N, D, STAGES, dtype,
            )  # fmt: skip
        n += blocks

        release_slot(do_slots, CONSUMER)
        q.store((dq * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [b, h, first, 0], q_tile)
        tma.store_wait(pendings=0)
        release_slot(q_slots, CONSUMER)


@gluon.jit(do_not_specialize=[
    "o_strides", "T_q", "T_k", "H_q", "G", "total", "heads", "tiles", "group", "group_tiles",
    "query_offset", "left", "right",
])  # fmt: skip
def hopper_backward_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, o_ptr, o_strides, lse_ptr, dlse_ptr, delta_ptr,
    offsets_ptr, lengths_ptr,
    T_q, T_k, H_q, G, total, heads, tiles, group, group_tiles, query_offset, left, right,
    scale, scale_log2,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 128 queries of each head."""
    q_slots = allocate_ring(q_desc, 2, 1)
    do_slots = allocate_ring(do_desc, 2, 1)
    k_ring = allocate_ring(k_desc, STAGES, 2)
    v_ring = allocate_ring(v_desc, STAGES, 2)
    landed = allocate_barriers(1, 1).index(0)  # see load_keys
    order = (heads, tiles, group, group_tiles)
    problem = (T_q, T_k, H_q, G, query_offset, left, right)
    work = (order, problem, (offsets_ptr, lengths_ptr), total)
    inputs = (q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, work)
    stats = (lse_ptr, dlse_ptr, delta_ptr)
    outputs = (
        dq_desc, q_slots, do_slots, k_ring, v_ring, (o_ptr, o_strides), stats, (scale, scale_log2),
        work,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (outputs, 0, BLOCK_N, D, STAGES)),
        (_consume, (outputs, 1, BLOCK_N, D, STAGES)),
        (_produce, (inputs, BLOCK_N, D, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
