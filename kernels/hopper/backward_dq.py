"""dQ for Hopper: two consumers with 64 queries each; K and V are streamed.

Scores as in forward, then dS as the register operand of dS K. The kernel also writes the rows' lse
and delta in the form that dK/dV subtracts.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..rules.integers import value
from ..rules.plans import full_block, masked_block
from ..rules.score import dropped, gradient, modified, slope_of
from ..rules.softmax import weights
from ..rules.tile import at_keys, clear_output
from .hidden_keys import allocate_landed, load_keys, shown_keys
from .one_pass import held
from .pairs import (
    allocate_bias,
    kept_pairs,
    load_bias,
    seen_pairs,
    take_bias,
    user_gradient,
    user_scores,
)
from .partitions import configured, run_partitions
from .pipeline import (
    ROWS,
    Output,
    accumulator_layout,
    allocate_ring,
    allocate_rings,
    as_operand,
    columns_of_row,
    load_slot,
    over_columns,
    products_of,
    release,
    release_slot,
    send,
    tile_of,
    wait_full,
    wait_slot,
)
from .schedule import SIZES, RowStats, Work, block_number, query_tile, stats_of_head


class BackwardDq(NamedTuple):
    """State shared by the partitions of dQ.

    q, do: a slot for each consumer. k, v: rings. landed: see `load_until`. bias: see
    `pairs.py`. lse_ptr, dlse_ptr, delta_ptr: [B, H_q, T_q]; stats: in whole tiles, for dK/dV.
    """

    q: Any
    do: Any
    k: Any
    v: Any
    landed: Any
    bias: Any
    dq: Any
    o_ptr: Any
    o_strides: Any
    lse_ptr: Any
    dlse_ptr: Any
    delta_ptr: Any
    stats: Any
    score: Any
    work: Any


class Queries(NamedTuple):
    """The 64 queries of a consumer: number of the first and of all, lse, delta, tile, slope."""

    first: Any
    rows: Any
    lse: Any
    delta: Any
    tile: Any
    slope: Any


@gluon.jit
def _load_tile(shared, tile, i, n, scrubs, config: gl.constexpr):
    """Producer: Q and dO of a tile, then its K and V blocks."""
    b, h, first = tile.b, tile.h, tile.first_q + tile.first
    h_k = h // shared.work.G
    for consumer in gl.static_range(2):
        load_slot(shared.q, i, b, h, first, consumer)
        load_slot(shared.do, i, b, h, first, consumer)
    for j in range(tile.blocks):
        key = block_number(j, tile, shared.work.mask) * config.BLOCK
        first_k = tile.first_k + key
        for consumer in gl.static_range(2):
            query = tile.first + consumer * ROWS
            load_bias(shared.bias, n, h, tile.row, query, key, shared.score, consumer)
        for ring in gl.static_range(2):
            x, mask, masked = (shared.k, shared.v)[ring], shared.work.mask, j < tile.boundary
            scrubs = load_keys(
                x, shared.landed, n, b, h_k, first_k, key, tile.row, mask, masked, scrubs
            )
        n += 1
    return n, scrubs


@gluon.jit
def _step(
    dq,
    n,
    more,
    key,
    mine,
    shared,
    MASKED: gl.constexpr,
    CONSUMER: gl.constexpr,
    config: gl.constexpr,
):
    """dq += dS K of the n-th block, from key number `key` on. more: whether another follows."""
    BLOCK_N: gl.constexpr = config.BLOCK
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N)
    dtype: gl.constexpr = shared.q.tiles.dtype
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    k = tile_of(shared.k, n)
    # With narrower heads there are registers for the addresses of all products.
    m = n if config.D == 256 else 0
    q = held(shared.q, CONSUMER, m)
    do = held(shared.do, CONSUMER, m)
    s = over_columns(q, k, zero, config.columns, False)
    wait_full(shared.v, n)
    v = tile_of(shared.v, n)
    dp = over_columns(do, v, zero, config.value_columns, False)
    s = warpgroup_mma_wait(products_of(config.value_columns), deps=[s])
    mask, score = shared.work.mask, shared.score
    h, row = mine.tile.h, at_keys(mine.tile.row, key, mask)
    rows = mine.rows[:, None]
    numbers = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    keys = numbers[None, :]
    bias = take_bias(shared.bias, n, LAYOUT, CONSUMER)
    s, factor, before, capped = modified(
        s, rows, keys, h, row, score, bias, first=key, slope=mine.slope, start=mine.first
    )
    s = user_scores(s, rows, keys, h, row, mask, score, config)
    seen = None
    if MASKED:
        shown = shown_keys(mine.rows, numbers, key, row, mask)
        seen = seen_pairs(rows, keys, h, row, mask, config, shown, key)
    p = weights(s, mine.lse[:, None], factor, seen)
    if score.dropout is not None:
        survivors = kept_pairs(mine.first, key, h, shared.work.H, row, score, BLOCK_N, False)
    # As in forward, without a branch ptxas would wait for dO V^T before the exponentials.
    wait_full(shared.k, n + 1, more)
    dp = warpgroup_mma_wait(0, deps=[dp])
    release(shared.v, n)
    if score.dropout is not None:
        dp = dropped(dp, survivors, score)
    dx = p * (dp - mine.delta[:, None])
    dx = user_gradient(dx, before, seen, rows, keys, h, row, mask, score, config)
    _dbias, ds = gradient(dx, before, capped, rows, keys, h, row, None, score)
    dq = warpgroup_mma(as_operand(ds, dtype, config.D), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    release(shared.k, n)
    return dq


@gluon.jit
def _row_dot(o_ptr, stride, do, kept, COLUMNS: gl.constexpr):
    """Sums of o * do over COLUMNS columns; o from global memory, its first `kept` rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, do.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointers = o_ptr + (rows.to(gl.int64) * stride)[:, None] + cols[None, :]
    exists = (rows < kept)[:, None]
    if do.shape[1] != COLUMNS:
        exists = exists & (cols < COLUMNS)[None, :]
    o = gl.load(pointers, mask=exists, other=0.0)
    return gl.sum(o.to(gl.float32) * do.load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def _load_delta(shared, tile, first, rows, of_head, do, config: gl.constexpr):
    """delta = rowsum(o * do) - dlse of 64 queries from number `first` on."""
    # Strides without `head`'s hint of divisibility, which takes too many registers.
    o_strides = shared.o_strides
    o_ptr = shared.o_ptr + gl.cast(tile.b, gl.int64) * value(o_strides[0])
    o_ptr += tile.h.to(gl.int64) * value(o_strides[1])
    o_ptr += (tile.first_q + first).to(gl.int64) * value(o_strides[2])
    delta = _row_dot(o_ptr, value(o_strides[2]), do, tile.length - first, config.value_columns)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, accumulator_layout(config.BLOCK)))
    exists = rows < tile.length
    if shared.work.mask.cu_q_ptr is not None:
        # Past the end are another sequence's rows.
        delta = gl.where(exists, delta, 0.0)
    if shared.dlse_ptr is not None:
        delta -= gl.load(shared.dlse_ptr + of_head, mask=exists, other=0.0)
    return delta


@gluon.jit
def _differentiate(shared, tile, i, n, CONSUMER: gl.constexpr, config: gl.constexpr):
    """Consumer: dQ and delta of 64 queries of the i-th tile, whose first block is the n-th."""
    D: gl.constexpr = config.D
    mask = shared.work.mask
    q_tile = shared.q.tiles.index(CONSUMER)
    do = shared.do.tiles.index(CONSUMER).reshape([ROWS, config.value_tile])
    first = tile.first + CONSUMER * ROWS
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK))
    rows = first + gl.arange(0, ROWS, layout=S_ROWS)
    number_of_head = (tile.b * shared.work.H + tile.h).to(gl.int64)
    of_head = number_of_head * shared.work.T_q + tile.first_q + rows
    exists = rows < tile.length
    lse = gl.load(shared.lse_ptr + of_head, mask=exists, other=float("inf"))
    # The weights of a row without keys are 0, not exp(-inf - -inf).
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    wait_slot(shared.q, i, CONSUMER)
    wait_slot(shared.do, i, CONSUMER)
    delta = _load_delta(shared, tile, first, rows, of_head, do, config)
    if shared.delta_ptr is not None:
        gl.store(shared.delta_ptr + of_head, delta, mask=exists)
    slots = stats_of_head(shared.stats, number_of_head, tile, mask) + rows
    gl.store(shared.stats.minus_delta_ptr + slots, -delta)
    gl.store(shared.stats.minus_lse_ptr + slots, -lse / shared.score.scale)

    mine = Queries(first, rows, lse, delta, tile, slope_of(tile.h, tile.row, shared.score))
    dq = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    wait_full(shared.k, n)
    for j in range(tile.boundary):
        key = masked_block(j, tile.plan, mask) * config.BLOCK
        dq = _step(dq, n + j, j + 1 < tile.blocks, key, mine, shared, True, CONSUMER, config)
    for j in range(tile.boundary, tile.blocks):
        key = full_block(j - tile.boundary, tile.plan, mask) * config.BLOCK
        dq = _step(dq, n + j, j + 1 < tile.blocks, key, mine, shared, False, CONSUMER, config)

    release_slot(shared.do, CONSUMER)
    dq = dq * shared.score.scale
    first_q, kept = tile.first_q + first, tile.length - first
    send(shared.dq, q_tile, dq, tile.b, tile.h, first_q, kept, config.columns)
    tma.store_wait(pendings=0)
    release_slot(shared.q, CONSUMER)
    return n + tile.blocks


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward_dq_kernel(
    dq_ptr,
    o_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    minus_lse_ptr,
    minus_delta_ptr,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    bias_desc,
    dq_strides,
    o_strides,
    stats_stride,
    mask,
    order_ptr,
    score,
    T_q,
    T_k,
    H,
    G,
    heads,
    tiles,
    group,
    pairs,
    pair_group,
    given: gl.constexpr,
    mods,
):
    """Persistent grid of any size over tiles of 128 queries of each head.

    dq_desc, dq_strides: see `Output`. bias_desc: None without attn_bias. dlse_ptr,
    delta_ptr: None if not given and not wanted, respectively.
    """
    config: gl.constexpr = configured(given, *mods)
    work = Work(heads, tiles, group, pairs, T_q, T_k, H, mask, pair_group, G, order_ptr)
    if mask.cu_q_ptr is not None:
        ends = (mask.cu_q_ptr, mask.sequences, T_q)
        clear_output(dq_ptr, dq_strides, columns_of_row(config.D), config.columns, H, ends)
    landed = allocate_landed(mask)
    k, v = allocate_rings(k_desc, v_desc, config)
    shared = BackwardDq(
        q=allocate_ring(q_desc, 2, 1),
        do=allocate_ring(do_desc, 2, 1),
        k=k,
        v=v,
        landed=landed,
        bias=allocate_bias(bias_desc, 2),
        dq=Output(dq_desc, dq_ptr, dq_strides),
        o_ptr=o_ptr,
        o_strides=o_strides,
        lse_ptr=lse_ptr,
        dlse_ptr=dlse_ptr,
        delta_ptr=delta_ptr,
        stats=RowStats(minus_lse_ptr, minus_delta_ptr, stats_stride),
        score=score,
        work=work,
    )
    run_partitions(query_tile, _load_tile, _differentiate, shared, config)
