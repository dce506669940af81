"""dK and dV for Hopper: two consumers of 64 keys each keep them in registers, queries stream by.

With `dq_desc` dQ too, see `one_pass`.

Transposed, keys down and queries across, so that P^T and dS^T are the register operands of dV and
dK and nothing but K, V, Q and dO passes through shared memory. The G query heads of a K/V head are
met by one program, one after the other: sums in registers, in a fixed order, no atomics.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..rules.mask import full_block, masked_block
from ..rules.score import gradient, modified
from ..rules.softmax import weights
from .band import block_number, sees
from .one_pass import add_dq, allocate_exchange, held, share, start_dq, wait_read
from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_barriers,
    allocate_ring,
    as_operand,
    first_slot,
    load_until,
    release,
    release_slot,
    send,
    tile_of,
    wait_full,
    wait_slot,
)
from .schedule import key_tile, number_of_tiles


@gluon.jit
def _produce(
    inputs, EARLY_K: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """Load K and V of each tile, then the blocks of queries of all its heads."""
    G, work = inputs[-2:]
    _order, _T_q, _T_k, _H_k, mask, total = work
    done = 0
    n = 0
    scrubs = 0
    for i in range(number_of_tiles(total)):
        tile = key_tile(i, work, G, 2 * ROWS, BLOCK_M)
        if mask.cu_k_ptr is None or tile[1] < tile[2].T_k:
            n, scrubs = _load_tile(inputs, tile, done, n, scrubs, EARLY_K, BLOCK_M, D, STAGES)
            done += 1


@gluon.jit
def _load_tile(
    inputs, tile, i, n, scrubs,
    EARLY_K: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The i-th tile that there is; n and scrubs go on, see `load_until`.

    EARLY_K: what keys past the end hold would reach dQ.
    """
    q_desc, k_desc, v_desc, do_desc, k_slots, v_slots, q_ring, do_ring, landed, G, work = inputs
    _order, _T_q, _T_k, _H_k, mask, _total = work
    EARLY: gl.constexpr = mask.cu_q_ptr is not None
    h, first, batch, memory, plan = tile
    b, first_q, first_k = memory
    masked, blocks, at = plan
    # The slots of both consumers are a ring of two stages.
    for consumer in gl.static_range(2):
        key = first + consumer * ROWS
        scrubs = load_until(
            k_slots, 2 * i + consumer, k_desc, b, h, first_k + key, batch.end - key, landed, scrubs,
            ROWS, D, 2, EARLY_K,
        )  # fmt: skip
    for consumer in gl.static_range(2):
        key = first + consumer * ROWS
        scrubs = load_until(
            v_slots, 2 * i + consumer, v_desc, b, h, first_k + key, batch.end - key, landed, scrubs,
            ROWS, D, 2, EARLY_K,
        )  # fmt: skip
    for g in range(G):
        for j in range(blocks):
            row = block_number(j, masked, at, mask) * BLOCK_M
            scrubs = load_until(
                q_ring, n, q_desc, b, h * G + g, first_q + row, batch.T_q - row, landed, scrubs,
                BLOCK_M, D, STAGES, EARLY,
            )  # fmt: skip
            scrubs = load_until(
                do_ring, n, do_desc, b, h * G + g, first_q + row, batch.T_q - row, landed, scrubs,
                BLOCK_M, D, STAGES, EARLY,
            )  # fmt: skip
            n += 1
    return n, scrubs


@gluon.jit
def _step(
    dk, dv, k_slots, v_slots, q_ring, do_ring, exchange, n, stats, memory, row, keys, h, batch,
    mask, score,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """dk += dS^T q and dv += P^T do of one block of queries, from row `row` on; dS k goes its way.

    A row past the last starts from -inf, so its weights are 0 and need no mask.
    """
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    # Products still under way when that of dv is over.
    AFTER_DV: gl.constexpr = 1 if exchange is None else 3
    minus_lse_ptr, minus_delta_ptr = stats
    k = held(k_slots, CONSUMER, n, D)
    v = held(v_slots, CONSUMER, n, D)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    # Both products start from what their result needs subtracted, so that neither lse nor delta
    # has to be kept beside them. Keys that do not exist start elsewhere: were all rows plainly
    # equal they would be copied from one another between the products, and ptxas would wait there.
    # For dQ that is where their weights are 0.
    exists = keys < batch.end
    nowhere = gl.where(exists, 0.0, float("-inf"))[:, None]
    elsewhere = gl.where(exists, 0.0, 1.0)[:, None]
    minus_lse = gl.load(minus_lse_ptr + rows)[None, :]
    s_start = nowhere + minus_lse
    dp_start = elsewhere + gl.load(minus_delta_ptr + rows)[None, :]
    lse = 0.0
    if score.softcap is not None:
        # What a capped score needs subtracted cannot be subtracted before.
        lse = (minus_lse if exchange is None else s_start) * -score.scale

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
    ds = ds.to(dtype)
    if exchange is not None:
        share(exchange, n, ds, CONSUMER)
        dq = start_dq(exchange, n, k_slots, CONSUMER, D)
    dk = warpgroup_mma(as_operand(ds, dtype, D), q, dk, is_async=True)
    dv = warpgroup_mma_wait(AFTER_DV, deps=[dv])
    release(do_ring, n, STAGES)
    if exchange is not None:
        dq = warpgroup_mma_wait(1, deps=[dq])
        b, first_q, _first_k = memory
        add_dq(exchange, n, dq, b, h, first_slot(batch.b, first_q, mask) + row, CONSUMER)
    dk = warpgroup_mma_wait(0, deps=[dk])
    release(q_ring, n, STAGES)
    return dk, dv


@gluon.jit
def _consume(
    outputs, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """dK and dV of 64 keys of each tile."""
    G, work = outputs[-2:]
    _order, _T_q, _T_k, _H_k, mask, total = work
    done = 0
    n = 0
    for i in range(number_of_tiles(total)):
        tile = key_tile(i, work, G, 2 * ROWS, BLOCK_M)
        if mask.cu_k_ptr is None or tile[1] < tile[2].T_k:
            n = _differentiate(outputs, tile, done, n, CONSUMER, BLOCK_M, D, STAGES)
            done += 1


@gluon.jit
def _differentiate(
    outputs, tile, i, n,
    CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The i-th tile that there is, whose first block is the n-th; returns the n of the next."""
    dk_out, dv_out, k_slots, v_slots, q_ring, do_ring, exchange, stats, score, G, work = outputs
    _order, _T_q, _T_k, H_k, mask, _total = work
    minus_lse_ptr, minus_delta_ptr, stats_stride = stats
    LAYOUT: gl.constexpr = accumulator_layout(D)
    dtype: gl.constexpr = dk_out[0].dtype
    h, first, batch, memory, plan = tile
    b, first_q, first_k = memory
    masked, blocks, at = plan
    first += CONSUMER * ROWS
    keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(BLOCK_M)))
    dk = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    wait_slot(k_slots, i, CONSUMER)
    wait_slot(v_slots, i, CONSUMER)
    for g in range(G):
        row_of_stats = ((b * H_k + h) * G + g).to(gl.int64) * stats_stride
        row_of_stats += first_slot(batch.b, first_q, mask)
        head_stats = (minus_lse_ptr + row_of_stats, minus_delta_ptr + row_of_stats)
        for j in range(masked):
            row = masked_block(j, at, mask) * BLOCK_M
            dk, dv = _step(
                dk, dv, k_slots, v_slots, q_ring, do_ring, exchange, n + j, head_stats,
                memory, row, keys, h * G + g, batch, mask, score,
                True, CONSUMER, BLOCK_M, D, STAGES, dtype,
            )  # fmt: skip
        for j in range(blocks - masked):
            row = full_block(j, at, mask) * BLOCK_M
            dk, dv = _step(
                dk, dv, k_slots, v_slots, q_ring, do_ring, exchange, n + masked + j, head_stats,
                memory, row, keys, h * G + g, batch, mask, score,
                False, CONSUMER, BLOCK_M, D, STAGES, dtype,
            )  # fmt: skip
        n += blocks

    if exchange is not None:
        wait_read(exchange, n, CONSUMER)
    # The weights of keys that no query may see were never masked: they end here.
    exists = (first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) < batch.end)[:, None]
    held(k_slots, CONSUMER, n, D).store(gl.where(exists, dk * score.scale, 0.0).to(dtype))
    dk_desc, dk_rows = dk_out
    send(
        dk_desc, k_slots[0].index(CONSUMER), dk_rows, b, h, first_k + first, batch.T_k - first, D
    )  # fmt: skip
    held(v_slots, CONSUMER, n, D).store(gl.where(exists, dv, 0.0).to(dtype))
    dv_desc, dv_rows = dv_out
    send(
        dv_desc, v_slots[0].index(CONSUMER), dv_rows, b, h, first_k + first, batch.T_k - first, D
    )  # fmt: skip
    tma.store_wait(pendings=0)
    release_slot(k_slots, CONSUMER)
    release_slot(v_slots, CONSUMER)
    return n


@gluon.jit(do_not_specialize=[
    "stats_stride", "T_q", "T_k", "H_k", "G", "total", "heads", "tiles", "group", "group_tiles",
])  # fmt: skip
def hopper_backward_dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dk_rows, dv_rows, dq_desc,
    minus_lse_ptr, minus_delta_ptr,
    stats_stride, mask, score,
    T_q, T_k, H_k, G, total, heads, tiles, group, group_tiles,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 128 keys of each K/V head.

    minus_lse, minus_delta: rows of stats_stride numbers, a head each, of `backward_dq`.
    dk_rows, dv_rows: as o_rows of the forward kernel. dq_desc: None, or of fp32
    [B, H_q, stats_stride, D], to which dQ is added without its scale, in tiles of BLOCK_M rows and
    D / 2 columns.
    """
    k_slots = allocate_ring(k_desc, 2, 1)
    v_slots = allocate_ring(v_desc, 2, 1)
    q_ring = allocate_ring(q_desc, STAGES, 2)
    do_ring = allocate_ring(do_desc, STAGES, 2)
    landed = allocate_barriers(1, 1).index(0)  # see load_until
    exchange: gl.constexpr = None
    if dq_desc is not None:
        exchange = allocate_exchange(dq_desc, q_desc.dtype)
    EARLY_K: gl.constexpr = dq_desc is not None and (
        mask.lengths_ptr is not None or mask.cu_k_ptr is not None
    )
    work = ((heads, tiles, group, group_tiles), T_q, T_k, H_k, mask, total)
    inputs = (q_desc, k_desc, v_desc, do_desc, k_slots, v_slots, q_ring, do_ring, landed, G, work)
    stats = (minus_lse_ptr, minus_delta_ptr, stats_stride)
    dk_out, dv_out = (dk_desc, dk_rows), (dv_desc, dv_rows)
    outputs = (
        dk_out, dv_out, k_slots, v_slots, q_ring, do_ring, exchange, stats, score, G, work,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (outputs, 0, BLOCK_M, D, STAGES)),
        (_consume, (outputs, 1, BLOCK_M, D, STAGES)),
        (_produce, (inputs, EARLY_K, BLOCK_M, D, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
