"""dQ for Hopper: two consumers of 64 queries each, K and V stream by.

The scores as in forward, then dS as the register operand of dS K. The lse and delta of each row are
written as dK/dV takes them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..rules.integers import value
from ..rules.mask import full_block, masked_block
from ..rules.score import gradient, modified
from ..rules.softmax import weights
from .band import block_number, sees
from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_barriers,
    allocate_ring,
    as_operand,
    first_slot,
    load_slot,
    load_until,
    release,
    release_slot,
    send,
    tile_of,
    wait_full,
    wait_slot,
)
from .schedule import number_of_tiles, query_tile


@gluon.jit
def _produce(inputs, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load Q and dO of each tile, then its K and V blocks."""
    _order, _T_q, _T_k, _H_q, mask, total = inputs[-1]
    done = 0
    n = 0
    scrubs = 0
    for i in range(number_of_tiles(total)):
        tile = query_tile(i, inputs[-1], 2 * ROWS, BLOCK_N)
        if mask.cu_q_ptr is None or tile[1] < tile[2].T_q:
            n, scrubs = _load_tile(inputs, tile, done, n, scrubs, BLOCK_N, D, STAGES)
            done += 1


@gluon.jit
def _load_tile(
    inputs, tile, i, n, scrubs, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """The i-th tile that there is; n and scrubs go on, see `load_until`."""
    q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, G, work = inputs
    _order, _T_q, _T_k, _H_q, mask, _total = work
    EARLY: gl.constexpr = mask.lengths_ptr is not None or mask.cu_k_ptr is not None
    h, first, row, memory, plan = tile
    b, first_q, first_k = memory
    masked, blocks, at = plan
    for consumer in gl.static_range(2):
        load_slot(q_slots, i, q_desc, b, h, first_q + first, consumer)
        load_slot(do_slots, i, do_desc, b, h, first_q + first, consumer)
    for j in range(blocks):
        key = block_number(j, masked, at, mask) * BLOCK_N
        scrubs = load_until(
            k_ring, n, k_desc, b, h // G, first_k + key, row.end - key, landed, scrubs,
            BLOCK_N, D, STAGES, EARLY,
        )  # fmt: skip
        scrubs = load_until(
            v_ring, n, v_desc, b, h // G, first_k + key, row.end - key, landed, scrubs,
            BLOCK_N, D, STAGES, EARLY,
        )  # fmt: skip
        n += 1
    return n, scrubs


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
    _order, _T_q, _T_k, _H_q, mask, total = outputs[-1]
    done = 0
    n = 0
    for i in range(number_of_tiles(total)):
        tile = query_tile(i, outputs[-1], 2 * ROWS, BLOCK_N)
        if mask.cu_q_ptr is None or tile[1] < tile[2].T_q:
            n = _differentiate(outputs, tile, done, n, CONSUMER, BLOCK_N, D, STAGES)
            done += 1


@gluon.jit
def _differentiate(
    outputs, tile, i, n,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The i-th tile that there is, whose first block is the n-th; returns the n of the next."""
    dq_desc, dq_rows, q_slots, do_slots, k_ring, v_ring, o_rows, stats, score, work = outputs
    _order, T_q, _T_k, H_q, mask, _total = work
    lse_ptr, dlse_ptr, delta_ptr, minus_lse_ptr, minus_delta_ptr, stats_stride = stats
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    dtype: gl.constexpr = dq_desc.dtype
    q_tile = q_slots[0].index(CONSUMER)
    q = q_tile.reshape([ROWS, D])
    do = do_slots[0].index(CONSUMER).reshape([ROWS, D])
    h, first, row, memory, plan = tile
    b, first_q, _first_k = memory
    masked, blocks, at = plan
    first += CONSUMER * ROWS
    rows = first + gl.arange(0, ROWS, layout=S_ROWS)
    of_head = (b * H_q + h).to(gl.int64) * T_q + first_q + rows
    lse = gl.load(lse_ptr + of_head, mask=rows < row.T_q, other=float("inf"))
    wait_slot(q_slots, i, CONSUMER)
    wait_slot(do_slots, i, CONSUMER)
    o_ptr, o_strides = o_rows
    o_head = o_ptr + gl.cast(b, gl.int64) * value(o_strides[0])
    o_head += h.to(gl.int64) * value(o_strides[1])
    o_head += (first_q + first).to(gl.int64) * value(o_strides[2])
    delta = _row_dot(o_head, value(o_strides[2]), do, row.T_q - first, D)
    delta = gl.convert_layout(delta, S_ROWS)
    if mask.cu_q_ptr is not None:
        # Past the end are the rows of another sequence.
        delta = gl.where(rows < row.T_q, delta, 0.0)
    if dlse_ptr is not None:
        delta -= gl.load(dlse_ptr + of_head, mask=rows < row.T_q, other=0.0)
    if delta_ptr is not None:
        gl.store(delta_ptr + of_head, delta, mask=rows < row.T_q)
    of_head = (b * H_q + h).to(gl.int64) * stats_stride + first_slot(row.b, first_q, mask) + rows
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

    release_slot(do_slots, CONSUMER)
    q.store((dq * score.scale).to(dtype))
    send(dq_desc, q_tile, dq_rows, b, h, first_q + first, row.T_q - first, D)
    tma.store_wait(pendings=0)
    release_slot(q_slots, CONSUMER)
    return n + blocks


@gluon.jit(do_not_specialize=[
    "stats_stride", "T_q", "T_k", "H_q", "G", "total", "heads", "tiles", "group", "group_tiles",
])  # fmt: skip
def hopper_backward_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_rows, o_rows, lse_ptr, dlse_ptr,
    delta_ptr, minus_lse_ptr, minus_delta_ptr, stats_stride, mask, score,
    T_q, T_k, H_q, G, total, heads, tiles, group, group_tiles,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 128 queries of each head.

    Writes beside dQ what the scores and dP of each row start from in dK/dV: minus_lse = -lse /
    scale and minus_delta, heads stats_stride apart and whole tiles, -inf and 0 past the last row.
    o_rows: o and its strides; dq_rows: as o_rows of the forward kernel.
    """
    q_slots = allocate_ring(q_desc, 2, 1)
    do_slots = allocate_ring(do_desc, 2, 1)
    k_ring = allocate_ring(k_desc, STAGES, 2)
    v_ring = allocate_ring(v_desc, STAGES, 2)
    landed = allocate_barriers(1, 1).index(0)  # see load_until
    work = ((heads, tiles, group, group_tiles), T_q, T_k, H_q, mask, total)
    inputs = (q_desc, k_desc, v_desc, do_desc, q_slots, do_slots, k_ring, v_ring, landed, G, work)
    stats = (lse_ptr, dlse_ptr, delta_ptr, minus_lse_ptr, minus_delta_ptr, stats_stride)
    outputs = (
        dq_desc, dq_rows, q_slots, do_slots, k_ring, v_ring, o_rows, stats, score, work,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (outputs, 0, BLOCK_N, D, STAGES)),
        (_consume, (outputs, 1, BLOCK_N, D, STAGES)),
        (_produce, (inputs, BLOCK_N, D, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
