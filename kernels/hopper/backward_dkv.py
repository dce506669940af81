"""dK and dV for Hopper, in registers of two consumers with 64 keys each; queries are streamed.

With `dq_ptr` also dQ, see `one_pass`.

Transposed, keys down and queries across, so that P^T and dS^T are register operands of dV and dK,
and only K, V, Q and dO pass through shared memory. A program loops over the G query heads of a K/V
head: sums in registers, in a fixed order, without atomics. If there are too few tiles of keys for
the device, several programs share a tile (`schedule.heads_of_part`), and another kernel adds their
sums in a fixed order.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..rules.plans import full_block, masked_block
from ..rules.score import dropped, gradient, modified, slope_of
from ..rules.softmax import weights
from ..rules.tile import at_queries, clear_output
from .hidden_keys import allocate_landed, load_keys, load_until, some_exist
from .one_pass import (
    DqSum,
    add_by_threads,
    add_by_tma,
    allocate_dq_tiles,
    allocate_exchange,
    held,
    share,
    start_dq,
    wait_read,
)
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
    allocate_barriers,
    allocate_ring,
    allocate_rings,
    as_operand,
    columns_of_row,
    load,
    over_columns,
    products_of,
    release,
    release_slot,
    send,
    stage_and_parity,
    store_rows,
    tile_of,
    wait_full,
    wait_slot,
)
from .schedule import (
    SIZES,
    RowStats,
    Work,
    block_number,
    blocks_of_part,
    heads_of_part,
    key_tile,
    kv_head,
    loops_of_part,
    row_of_stats,
    stats_of_head,
)


class BackwardDkv(NamedTuple):
    """State shared by the partitions of dK/dV.

    k, v: a slot for each consumer. q, do: rings. k_landed (of k and v), q_landed (of q and dO): see
    `load_until`. bias: see `pairs.py`. stats_ring: of the queries in q. exchange: of `one_pass`, or
    None. dq: likewise, a `DqSum`. dk, dv: without ptr if not computed; without dk there is no v.
    dv_tiles: a store buffer of dV for each consumer. dk_parts_ptr, dv_parts_ptr: see `_store`.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    stats_ring: Any
    k_landed: Any
    q_landed: Any
    bias: Any
    dq: Any
    dk: Any
    dv: Any
    dv_tiles: Any
    dk_parts_ptr: Any
    dv_parts_ptr: Any
    exchange: Any
    stats: Any
    score: Any
    work: Any


class StatsRing(NamedTuple):
    """-lse / scale and -delta of the queries in the stages of Q's ring, fp32 [STAGES, BLOCK].

    full: mbarriers. A stage is empty when Q's is.
    """

    minus_lse: Any
    minus_delta: Any
    full: Any


class Keys(NamedTuple):
    """The 64 keys of a consumer, for one query head: number of the first and of all, tile, head,
    slope.

    exist: which of them some query may see; None if the row's end says it.
    """

    first: Any
    keys: Any
    tile: Any
    h: Any
    exist: Any
    slope: Any


@gluon.jit
def _allocate_stats_ring(STAGES: gl.constexpr, BLOCK: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    minus_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], LAYOUT)
    minus_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], LAYOUT)
    return StatsRing(minus_lse, minus_delta, allocate_barriers(STAGES, 1))


@gluon.jit
def _load_tile(shared, tile, i, n, scrubs, config: gl.constexpr):
    """Producer: K and V of a tile, then the blocks of queries of all its heads."""
    b, G, work = tile.b, shared.work.G, shared.work
    rows = gl.arange(0, config.BLOCK, layout=gl.BlockedLayout([config.BLOCK // 32], [32], [1], [0]))
    h_k = kv_head(tile.h, work)
    scrubs = _load_tile_keys(shared.k, shared.k_landed, tile, h_k, i, work.mask, scrubs)
    if shared.v is not None:
        scrubs = _load_tile_keys(shared.v, shared.k_landed, tile, h_k, i, work.mask, scrubs)
    first_g, end_g = heads_of_part(tile, work)
    for g in range(first_g, end_g):
        h = h_k * G + g
        head = (b * work.H + h_k) * G + g
        slots = stats_of_head(shared.stats, head.to(gl.int64), tile, work.mask) + rows
        begin, stop = blocks_of_part(g, tile, work)
        for j in range(begin, stop):
            row = block_number(j, tile, work.mask) * config.BLOCK
            first, end = tile.first_q + row, tile.row.T_q - row
            # Started while the stage is still read.
            minus_lse = gl.load(shared.stats.minus_lse_ptr + slots + row)
            minus_delta = gl.load(shared.stats.minus_delta_ptr + slots + row)
            scrubs = load_until(shared.q, shared.q_landed, n, b, h, first, end, scrubs)
            stage, _parity = stage_and_parity(shared.q, n)
            shared.stats_ring.minus_lse.index(stage).store(minus_lse)
            shared.stats_ring.minus_delta.index(stage).store(minus_delta)
            mbarrier.arrive(shared.stats_ring.full.index(stage), count=1)
            for consumer in gl.static_range(2):
                key = tile.first + consumer * ROWS
                load_bias(shared.bias, n, h, tile.row, row, key, shared.score, consumer)
            scrubs = load_until(shared.do, shared.q_landed, n, b, h, first, end, scrubs)
            n += 1
    return n, scrubs


@gluon.jit
def _load_tile_keys(slots, landed, tile, h, i, mask, scrubs):
    """K or V of a tile. The slots of both consumers are a ring of two stages."""
    for consumer in gl.static_range(2):
        key = tile.first + consumer * ROWS
        n, first = 2 * i + consumer, tile.first_k + key
        if landed is None:
            load(slots, n, tile.b, h, first)
        else:
            scrubs = load_keys(
                slots, landed, n, tile.b, h, first, key, tile.row, mask, True, scrubs
            )
    return scrubs


@gluon.jit
def _minus_delta(n, shared, config: gl.constexpr):
    """-delta of the queries of the n-th block, [1, BLOCK]."""
    stage, _parity = stage_and_parity(shared.q, n)
    VECTOR: gl.constexpr = gl.SliceLayout(0, accumulator_layout(config.BLOCK))
    return shared.stats_ring.minus_delta.index(stage).load(VECTOR)[None, :]


@gluon.jit
def _starts(n, row, mine, shared, config: gl.constexpr):
    """Initial S^T and dP^T of the n-th block, and the lse that is left to subtract.

    Both start from the negated subtrahend, so that lse and delta need no registers. Nonexistent
    keys start from another value: if all rows were equal, ptxas would copy registers between the
    products, and wait there. For dQ they start where their weights are 0.
    """
    LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK)
    score = shared.score
    rows = row + gl.arange(0, config.BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    exists = mine.keys < mine.tile.row.end
    if mine.exist is not None:
        exists = mine.exist
    nowhere = gl.where(exists, 0.0, float("-inf"))[:, None]
    elsewhere = gl.where(exists, 0.0, 1.0)[:, None]
    stage, parity = stage_and_parity(shared.q, n)
    mbarrier.wait(shared.stats_ring.full.index(stage), parity)
    VECTOR: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    minus_lse = shared.stats_ring.minus_lse.index(stage).load(VECTOR)[None, :]
    s_start = nowhere + minus_lse
    dp_start = elsewhere + _minus_delta(n, shared, config)
    lse = 0.0
    if score.softcap is not None or config.SCORE_MOD is not None:
        # The subtrahend of such a score cannot be subtracted before.
        lse = (minus_lse if shared.exchange is None else s_start) * -score.scale
    return rows, s_start, dp_start, lse


@gluon.jit
def _step(
    dk, dv, n, row, mine, shared, MASKED: gl.constexpr, CONSUMER: gl.constexpr, config: gl.constexpr
):
    """dk += dS^T Q and dv += P^T dO of the n-th block, from query number `row` on.

    With an exchange dS K is added to dQ. Rows past the last start from -inf, so their weights are 0
    without a mask.
    """
    dtype: gl.constexpr = shared.q.tiles.dtype
    exchange, score = shared.exchange, shared.score
    mask = shared.work.mask
    h, batch = mine.h, at_queries(mine.tile.row, row, mask)
    DK: gl.constexpr = shared.dk.ptr is not None
    DV: gl.constexpr = shared.dv.ptr is not None
    # Products in flight when dv's is complete.
    AFTER_DV: gl.constexpr = (1 if DK else 0) if exchange is None else 3
    k = held(shared.k, CONSUMER, n)
    rows, s_start, dp_start, lse = _starts(n, row, mine, shared, config)

    wait_full(shared.q, n)
    q = tile_of(shared.q, n)
    from_start: gl.constexpr = score.softcap is None and config.SCORE_MOD is None
    s = over_columns(k, q, s_start, config.columns, from_start)
    wait_full(shared.do, n)
    do = tile_of(shared.do, n)
    if DK:
        v = held(shared.v, CONSUMER, n)
        dp = over_columns(v, do, dp_start, config.value_columns, score.dropout is None)

    s = warpgroup_mma_wait(products_of(config.value_columns) if DK else 0, deps=[s])
    rows = rows[None, :]
    keys = mine.keys[:, None]
    bias = take_bias(shared.bias, n, accumulator_layout(config.BLOCK), CONSUMER, True)
    s, factor, before, capped = modified(
        s, rows, keys, h, batch, score, bias, first=row, slope=mine.slope, start=mine.first
    )
    s = user_scores(s, rows, keys, h, batch, mask, score, config)
    seen = None
    if MASKED:
        seen = seen_pairs(rows, keys, h, batch, mask, config)
    p = weights(s, lse, factor, seen)
    kept = p
    if score.dropout is not None:
        H_q = shared.work.H * shared.work.G
        survivors = kept_pairs(row, mine.first, h, H_q, batch, score, config.BLOCK, True)
        kept = gl.where(survivors, p, 0.0)
    if DV:
        dv = warpgroup_mma(as_operand(kept, dtype, config.value_tile), do, dv, is_async=True)
    if DK:
        if not DV:
            # Already loaded. As in forward, without a branch ptxas would wait for dP^T before the
            # exponentials.
            wait_full(shared.q, n)
        dp = warpgroup_mma_wait(1 if DV else 0, deps=[dp])
        if not DV:
            release(shared.do, n)
        if score.dropout is not None:
            dp = dropped(dp, survivors, score) + _minus_delta(n, shared, config)
        dx = user_gradient(p * dp, before, seen, rows, keys, h, batch, mask, score, config)
        _dbias, ds = gradient(dx, before, capped, rows, keys, h, batch, None, score)
        ds = ds.to(dtype)
        if exchange is not None:
            share(exchange, n, ds, CONSUMER)
            dq = start_dq(exchange, n, shared.k, CONSUMER)
        dk = warpgroup_mma(as_operand(ds, dtype, config.D), q, dk, is_async=True)
    if DV:
        dv = warpgroup_mma_wait(AFTER_DV, deps=[dv])
        release(shared.do, n)
    if exchange is not None:
        dq = warpgroup_mma_wait(1, deps=[dq])
        _add_dq(dq, n, row, mine, shared, CONSUMER)
    if DK:
        dk = warpgroup_mma_wait(0, deps=[dk])
    release(shared.q, n)
    return dk, dv


@gluon.jit
def _add_dq(dq, n, row, mine, shared, CONSUMER: gl.constexpr):
    """Add dQ of the n-th block, whose products are complete, to the sum, with rows as in stats.

    The sum is padded to whole tiles, so rows past the last query need no mask.
    """
    work, tile = shared.work, mine.tile
    release(shared.exchange[1 - CONSUMER], n)
    if shared.dq.tiles is None:
        head = (tile.b * work.H * work.G + mine.h).to(gl.int64)
        first = stats_of_head(shared.stats, head, tile, work.mask) + row
        add_by_threads(shared.dq, dq, first, CONSUMER)
    else:
        slot = row_of_stats(tile, work.mask) + row
        add_by_tma(shared.dq, n, dq, tile.b, mine.h, slot, CONSUMER)


@gluon.jit
def _differentiate(shared, tile, i, n, CONSUMER: gl.constexpr, config: gl.constexpr):
    """Consumer: dK and dV of 64 keys of the i-th tile, whose first block is the n-th."""
    work = shared.work
    G = work.G
    D: gl.constexpr = config.D
    D_V: gl.constexpr = config.value_tile
    KEYS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK))
    first = tile.first + CONSUMER * ROWS
    keys = first + gl.arange(0, ROWS, layout=KEYS)
    exist = some_exist(keys, tile.row, work.mask)
    dk = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([ROWS, D_V], gl.float32, accumulator_layout(D_V))
    wait_slot(shared.k, i, CONSUMER)
    if shared.v is not None:
        wait_slot(shared.v, i, CONSUMER)
    first_g, end_g = heads_of_part(tile, work)
    for g in range(first_g, end_g):
        h = kv_head(tile.h, work) * G + g
        mine = Keys(first, keys, tile, h, exist, slope_of(h, tile.row, shared.score))
        begin, stop = blocks_of_part(g, tile, work)
        boundary_end, full, full_end = loops_of_part(begin, stop, tile, work)
        n -= begin
        for j in range(begin, boundary_end):
            row = masked_block(j, tile.plan, work.mask) * config.BLOCK
            dk, dv = _step(dk, dv, n + j, row, mine, shared, True, CONSUMER, config)
        for j in range(full, full_end):
            row = full_block(j, tile.plan, work.mask) * config.BLOCK
            number = n + tile.boundary + j
            dk, dv = _step(dk, dv, number, row, mine, shared, False, CONSUMER, config)
        n += stop

    if shared.exchange is not None:
        wait_read(shared.exchange, n, CONSUMER)
    # Zero the gradients of invisible keys, whose weights were not masked.
    keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(D)))
    exists = keys < tile.row.end
    if exist is not None:
        exists = some_exist(keys, tile.row, work.mask)
    at = tile, first, work
    if shared.dk.ptr is not None:
        dk = gl.where(exists[:, None], dk * shared.score.scale, 0.0)
        slot = shared.k.tiles.index(CONSUMER)
        _store(shared.dk, shared.dk_parts_ptr, slot, dk, at, config.columns)
    if shared.dv.ptr is not None:
        exists = gl.convert_layout(exists, gl.SliceLayout(1, accumulator_layout(D_V)))
        if shared.score.dropout is not None:
            dv = dv * shared.score.dropout_scale
        dv = gl.where(exists[:, None], dv, 0.0)
        slot = shared.dv_tiles.index(CONSUMER)
        _store(shared.dv, shared.dv_parts_ptr, slot, dv, at, config.value_columns)
    tma.store_wait(pendings=0)
    release_slot(shared.k, CONSUMER)
    if shared.v is not None:
        release_slot(shared.v, CONSUMER)
    return n


@gluon.jit
def _store(out, parts_ptr, slot, x, at, COLUMNS: gl.constexpr):
    """Write 64 rows of an output through `slot`, or to parts_ptr if there are parts.

    parts_ptr: fp32 [B, H_k, parts, T_k, COLUMNS]. at: tile, its first row, and work.
    """
    tile, first, work = at
    kept = tile.length - first
    # One kernel with and without parts, so that no length compiles another.
    if work.parts is None or work.parts == 1:
        send(out, slot, x, tile.b, tile.h, tile.first_k + first, kept, COLUMNS)
    else:
        head = (tile.b * work.H * work.parts + tile.h).to(gl.int64)
        ptr = parts_ptr + (head * work.T_k + tile.first_k + first) * COLUMNS
        store_rows(ptr, COLUMNS, x, accumulator_layout(x.shape[1]), kept, COLUMNS)


@gluon.jit
def _clear(ptr, strides, parts_ptr, parts, H, ends, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):
    """`clear_output` of what `_store` writes."""
    if parts is None or parts == 1:
        clear_output(ptr, strides, columns_of_row(BLOCK), COLUMNS, H, ends)
    else:
        # As `runtime_int`s.
        of_parts = (3, 4 * ends[2] * COLUMNS + 3, 4 * COLUMNS + 3)
        clear_output(parts_ptr, of_parts, columns_of_row(BLOCK), COLUMNS, H * parts, ends)


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward_dkv_kernel(
    dq_ptr, dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, minus_lse_ptr, minus_delta_ptr, q_desc,
    k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, bias_desc, dk_strides, dv_strides,
    stats_stride, mask, order_ptr, score, T_q, T_k, H, G, heads, tiles, group, pairs, pair_group,
    parts, given: gl.constexpr, mods,
):  # fmt: skip
    """Persistent grid of any size over tiles of 128 keys of each K/V head, and their parts.

    dk_ptr, dv_ptr: None for a gradient that another launch computes; without dk, v_desc is None
    too. dk_desc, dk_strides, dv_desc, dv_strides: see `Output`; parts: see `_store`. dq_ptr: None,
    or fp32 [B, H_q, whole tiles, D] contiguous, to which dQ is added without its scale. dq_desc: of
    it, in tiles of BLOCK rows and D / 2 columns, if TMA adds; None if the threads do. bias_desc:
    None without attn_bias. parts: None with dq_ptr, whose kernel lacks registers for them.
    """
    config: gl.constexpr = configured(given, *mods)
    work = Work(heads, tiles, group, pairs, T_q, T_k, H, mask, pair_group, G, order_ptr, parts)
    if mask.cu_k_ptr is not None:
        ends = (mask.cu_k_ptr, mask.sequences, T_k)
        D: gl.constexpr = config.columns
        D_V: gl.constexpr = config.value_columns
        if dk_ptr is not None:
            _clear(dk_ptr, dk_strides, dk_parts_ptr, parts, H, ends, D, config.D)
        if dv_ptr is not None:
            _clear(dv_ptr, dv_strides, dv_parts_ptr, parts, H, ends, D_V, config.value_tile)
    dq_tiles: gl.constexpr = None
    if dq_desc is not None:
        dq_tiles = allocate_dq_tiles(dq_desc)
    exchange: gl.constexpr = None
    if dq_ptr is not None:
        exchange = allocate_exchange(q_desc.dtype, config.BLOCK)
    # Keys past the end would reach dQ, and queries past the end dK and dV.
    K_EARLY: gl.constexpr = dq_ptr is not None
    Q_EARLY: gl.constexpr = mask.cu_q_ptr is not None
    landed: gl.constexpr = None
    if K_EARLY or Q_EARLY:
        landed = allocate_landed(mask)
    q, do = allocate_rings(q_desc, do_desc, config)
    k = allocate_ring(k_desc, 2, 1)
    v = None if v_desc is None else allocate_ring(v_desc, 2, 1)
    # V's own tiles, or without V K's tiles of equal width.
    dv_tiles = k.tiles if v is None else v.tiles
    if v_desc is None and config.value_tile != config.D and dv_desc is not None:
        SHAPE: gl.constexpr = [2, 1, 1, ROWS, config.value_tile]
        dv_tiles = gl.allocate_shared_memory(dv_desc.dtype, SHAPE, dv_desc.layout)
    shared = BackwardDkv(
        k=k,
        v=v,
        q=q,
        do=do,
        stats_ring=_allocate_stats_ring(config.STAGES, config.BLOCK),
        k_landed=landed if K_EARLY else None,
        q_landed=landed if Q_EARLY else None,
        bias=allocate_bias(bias_desc, 2),
        dq=DqSum(dq_tiles, dq_desc, dq_ptr),
        dk=Output(dk_desc, dk_ptr, dk_strides),
        dv=Output(dv_desc, dv_ptr, dv_strides),
        dv_tiles=dv_tiles,
        dk_parts_ptr=dk_parts_ptr,
        dv_parts_ptr=dv_parts_ptr,
        exchange=exchange,
        stats=RowStats(minus_lse_ptr, minus_delta_ptr, stats_stride),
        score=score,
        work=work,
    )
    run_partitions(key_tile, _load_tile, _differentiate, shared, config)
