"""Forward for Hopper: a producer warp loads, consumer warpgroups of 64 queries multiply.

A consumer issues Q K^T of the next block before the softmax of this one, which overlaps with P V of
the previous block; README.md has a diagram. The same step serves 16 and 8 bits.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ..fp8.values import first_packed
from ..rules.score import Score, first_state, modified, slope_of, with_sink
from ..rules.softmax import LN2, finish, online_step
from ..rules.tile import at_keys, clear_output
from .hidden_keys import allocate_landed, load_keys, shown_keys
from .pairs import allocate_bias, kept_pairs, load_bias, seen_pairs, take_bias, user_scores
from .partitions import configured, run_partitions
from .pipeline import (
    ROWS,
    Output,
    accumulator_layout,
    allocate_barriers,
    allocate_ring,
    allocate_rings,
    as_operand,
    clear_statistic,
    columns_of_row,
    load,
    load_slot,
    over_columns,
    packed,
    pass_turn,
    release,
    release_slot,
    rescaled,
    send,
    take_turn,
    tile_of,
    unpacked,
    wait_full,
    wait_slot,
)
from .schedule import SIZES, Work, block_number, query_tile

_SMALLEST = gl.constexpr(2.0**-126)


class Forward(NamedTuple):
    """State shared by the partitions of forward.

    q: a slot for each consumer. k, v: rings. o_tiles: buffers of TMA stores. landed: see
    `load_until`. bias: see `pairs.py`. turns: see `take_turn`. scales: of 8-bit q, k and v, else
    None.
    """

    o: Any
    lse_ptr: Any
    max_ptr: Any
    q: Any
    o_tiles: Any
    k: Any
    v: Any
    landed: Any
    bias: Any
    turns: Any
    score: Any
    scales: Any
    work: Any


class Queries(NamedTuple):
    """The 64 queries of a consumer: q in shared memory, the first one's number, all numbers, tile,
    score and slope.
    """

    q: Any
    first: Any
    rows: Any
    tile: Any
    score: Any
    slope: Any


@gluon.jit
def _load_tile(shared, tile, i, n, scrubs, config: gl.constexpr):
    """Producer: the queries of a tile, and its K and V blocks in the order they are used."""
    b, h, first = tile.b, tile.h, tile.first_q + tile.first
    h_k = h // shared.work.G
    CONSUMERS: gl.constexpr = config.CONSUMERS
    TRANSPOSED: gl.constexpr = is_fp8(shared.v.desc.dtype)
    first_v = tile.first_k
    if TRANSPOSED:
        first_v = first_packed(tile.row.b, first_v, shared.work.mask)
    load_slot(shared.q, i, b, h, first, 0)
    for j in range(tile.blocks):
        key = block_number(j, tile, shared.work.mask) * config.BLOCK
        load(shared.k, n, b, h_k, tile.first_k + key)
        if j == 0:
            for consumer in gl.static_range(1, CONSUMERS):
                load_slot(shared.q, i, b, h, first, consumer)
        for consumer in gl.static_range(CONSUMERS):
            query = tile.first + consumer * ROWS
            load_bias(shared.bias, n, h, tile.row, query, key, shared.score, consumer)
        at, masked = (n, b, h_k, first_v + key, key), j < tile.boundary
        mask = shared.work.mask
        scrubs = load_keys(shared.v, shared.landed, *at, tile.row, mask, masked, scrubs, TRANSPOSED)
        n += 1
    return n, scrubs


@gluon.jit
def _start_scores(q, ring, n, config: gl.constexpr):
    """Issue Q K^T of the n-th block; its tile has arrived."""
    k = tile_of(ring, n)
    BLOCK_N: gl.constexpr = k.shape[0]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N, q.dtype))
    return over_columns(q, k, zero, config.columns, False)


@gluon.jit
def _start_values(acc, p, ring, n):
    """Issue acc + P V of the n-th block, whose tile has arrived; p: from `_waiting`."""
    v = tile_of(ring, n)
    if is_fp8(v.dtype):
        # In 8 bits the second operand also needs contiguous columns.
        v = v.permute((1, 0))
    if p.dtype == gl.float32:
        p = as_operand(p, v.dtype, v.shape[1])
    if p.dtype == gl.int32:
        p = as_operand(unpacked(p, v.dtype), v.dtype, v.shape[1])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _waiting(p, dtype: gl.constexpr, config: gl.constexpr):
    """Weights waiting for their product: fp32, or packed in pairs if registers are short."""
    # As product operands they would take a register each through the loop, and be packed anew.
    if not config.WIDE_WEIGHTS and not is_fp8(dtype):
        p = packed(p, dtype)
    return p


@gluon.jit
def _scores(s, bias, key, mine, mask, MASKED: gl.constexpr, config: gl.constexpr):
    """The scores of s = q.k, -inf where hidden, and the factor to log2 units: see `modified`."""
    LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK, mine.q.dtype)
    numbers = key + gl.arange(0, config.BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    rows, cols = mine.rows[:, None], numbers[None, :]
    h, row = mine.tile.h, at_keys(mine.tile.row, key, mask)
    s, factor, _before, _capped = modified(
        s, rows, cols, h, row, mine.score, bias, first=key, slope=mine.slope, start=mine.first
    )
    s = user_scores(s, rows, cols, h, row, mask, mine.score, config)
    if MASKED:
        shown = shown_keys(mine.rows, numbers, key, row, mask)
        seen = seen_pairs(rows, cols, h, row, mask, config, shown, key)
        s = gl.where(seen, s, float("-inf"))
    return s, factor


@gluon.jit
def _dropped(p, key, mine, shared, config: gl.constexpr):
    """The weights of the block from `key` on that dropout keeps, to be scaled, 0 for the others."""
    if mine.score.dropout is not None:
        h, row = mine.tile.h, at_keys(mine.tile.row, key, shared.work.mask)
        seen = kept_pairs(mine.first, key, h, shared.work.H, row, mine.score, config.BLOCK, False)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _first_block(m, l, n, mine, shared, CONSUMER: gl.constexpr, config: gl.constexpr):
    """Weights of a tile's first block, number n, without overlap."""
    dtype: gl.constexpr = mine.q.dtype
    wait_full(shared.k, n)
    take_turn(shared.turns, n, CONSUMER)
    s = _start_scores(mine.q, shared.k, n, config)
    pass_turn(shared.turns, CONSUMER, config.CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s])
    release(shared.k, n)
    mask = shared.work.mask
    key = block_number(0, mine.tile, mask) * config.BLOCK
    bias = take_bias(shared.bias, n, accumulator_layout(config.BLOCK, dtype), CONSUMER)
    s, factor = _scores(s, bias, key, mine, mask, True, config)
    p, _rescale, m, l = online_step(s, m, l, factor, True, weight_shift(dtype))
    p = _dropped(p, key, mine, shared, config)
    p = _waiting(p, dtype, config)
    wait_full(shared.k, n + 1, mine.tile.blocks > 1)
    return p, m, l


@gluon.jit
def _step(
    acc, p, m, l, n, more, key, mine, shared,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Scores of the n-th block, overlapped with values of the previous one, with weights p.

    key: the first of the block. more: whether another block follows.
    """
    dtype: gl.constexpr = mine.q.dtype
    take_turn(shared.turns, n, CONSUMER)
    s = _start_scores(mine.q, shared.k, n, config)
    wait_full(shared.v, n - 1)
    acc_next = _start_values(acc, p, shared.v, n - 1)
    pass_turn(shared.turns, CONSUMER, config.CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s])
    release(shared.k, n)
    bias = take_bias(shared.bias, n, accumulator_layout(config.BLOCK, dtype), CONSUMER)
    s, factor = _scores(s, bias, key, mine, shared.work.mask, MASKED, config)
    SLACK: gl.constexpr = weight_slack(dtype, config.SLACK)
    HIDES: gl.constexpr = MASKED or mine.score.hides is not None
    p, rescale, m, l = online_step(s, m, l, factor, HIDES, weight_shift(dtype), SLACK=SLACK)
    p = _dropped(p, key, mine, shared, config)
    # There must be a branch between the softmax and the wait for P V: otherwise ptxas moves the
    # wait before the exponentials, and nothing overlaps. The wait for the next keys is a branch.
    wait_full(shared.k, n + 1, more)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    # First, as all warps synchronise here, and only some rescale.
    release(shared.v, n - 1)
    acc = rescaled(acc, rescale, accumulator_layout(config.value_tile, dtype), SLACK > 0)
    return acc, _waiting(p, dtype, config), m, l


@gluon.jit
def _attend(shared, tile, i, n, CONSUMER: gl.constexpr, config: gl.constexpr):
    """Consumer: o and lse of 64 queries of the i-th tile, whose first block is the n-th."""
    D_V: gl.constexpr = config.value_tile
    work = shared.work
    q_tile = shared.q.tiles.index(CONSUMER)
    q = q_tile.reshape([ROWS, config.D])
    dtype: gl.constexpr = q.dtype
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK, dtype))
    O_LAYOUT: gl.constexpr = accumulator_layout(D_V, dtype)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    first = tile.first + CONSUMER * ROWS
    m = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([ROWS], gl.float32, S_ROWS)
    if shared.max_ptr is None:
        m, l = first_state(tile.h, m, l, shared.score)
    score = shared.score
    if is_fp8(dtype):
        m = m - weight_shift(dtype)
        l = l * (1 << weight_shift(dtype))
        scale, v_scale = head_scales(shared.scales, score.scale, tile, work)
        score = Score(scale, score.softcap, tensors=score.tensors, linear=score.linear)
    rows = first + gl.arange(0, ROWS, layout=S_ROWS)
    mine = Queries(q, first, rows, tile, score, slope_of(tile.h, tile.row, score))
    acc = gl.zeros([ROWS, D_V], gl.float32, O_LAYOUT)

    wait_slot(shared.q, i, CONSUMER)
    p, m, l = _first_block(m, l, n, mine, shared, CONSUMER, config)
    for j in range(1, tile.boundary):
        key = block_number(j, tile, work.mask) * config.BLOCK
        more = j + 1 < tile.blocks
        acc, p, m, l = _step(acc, p, m, l, n + j, more, key, mine, shared, True, CONSUMER, config)
    for j in range(gl.maximum(tile.boundary, 1), tile.blocks):
        key = block_number(j, tile, work.mask) * config.BLOCK
        more = j + 1 < tile.blocks
        acc, p, m, l = _step(acc, p, m, l, n + j, more, key, mine, shared, False, CONSUMER, config)
    n += tile.blocks
    wait_full(shared.v, n - 1)
    acc = _start_values(acc, p, shared.v, n - 1)
    if config.APART:
        release_slot(shared.q, CONSUMER)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(shared.v, n - 1)

    m, l = gl.convert_layout(m, O_ROWS), gl.convert_layout(l, O_ROWS)
    rows = first + gl.arange(0, ROWS, layout=O_ROWS)
    statistics = (tile.b * work.H + tile.h).to(gl.int64) * work.T_q + tile.first_q
    if shared.max_ptr is not None:
        # The sink comes last, so that it is not the largest score.
        gl.store(shared.max_ptr + statistics + rows, m * LN2, mask=rows < tile.length)
        acc, m, l = with_sink(acc, m, l, tile.h, shared.score)
    o, lse = finish(acc, m, l)
    if shared.score.dropout is not None:
        o = o * shared.score.dropout_scale
    if is_fp8(dtype):
        o = o * v_scale
    gl.store(shared.lse_ptr + statistics + rows, lse, mask=rows < tile.length)
    o_tile = q_tile
    if config.APART:
        o_tile = shared.o_tiles.index(CONSUMER)
        # The store of the previous tile is probably complete by now.
        tma.store_wait(pendings=0)
    first_o, kept = tile.first_q + first, tile.length - first
    send(shared.o, o_tile, o, tile.b, tile.h, first_o, kept, config.value_columns)
    if not config.APART:
        tma.store_wait(pendings=0)
        release_slot(shared.q, CONSUMER)
    return n


@gluon.jit(do_not_specialize=SIZES)
def hopper_forward_kernel(
    o_ptr, lse_ptr, max_ptr, q_desc, k_desc, v_desc, o_desc, bias_desc, o_strides, mask, order_ptr,
    score, scales, T_q, T_k, H, G, heads, tiles, group, pairs, pair_group, given: gl.constexpr,
    mods,
):  # fmt: skip
    """Persistent grid of any size over tiles of 64 * CONSUMERS queries of each head.

    max_ptr: of the rows' largest scores, if not None; SLACK is 0 then. o_desc, o_strides: see
    `Output`. bias_desc: None without attn_bias. scales: of e4m3 q [B, H_q], k and v [B, H_k], else
    None; b counts packed sequences too. v_desc is then of v packed by `kernels.fp8.values`.
    """
    config: gl.constexpr = configured(given, *mods)
    work = Work(heads, tiles, group, pairs, T_q, T_k, H, mask, pair_group, G, order_ptr)
    if mask.cu_q_ptr is not None:
        ends = (mask.cu_q_ptr, mask.sequences, T_q)
        cols = columns_of_row(config.value_tile)
        clear_output(o_ptr, o_strides, cols, config.value_columns, H, ends)
        clear_statistic(lse_ptr, H, ends)
        if max_ptr is not None:
            clear_statistic(max_ptr, H, ends)
    # Dims of shared memory are powers of two.
    SLOTS: gl.constexpr = 4 if config.CONSUMERS == 3 else config.CONSUMERS
    landed = allocate_landed(mask)
    q = allocate_ring(q_desc, SLOTS, 1)
    k, v = allocate_rings(k_desc, v_desc, config)
    o_tiles = q.tiles
    if config.APART and o_desc is not None:
        SHAPE: gl.constexpr = [SLOTS, 1, 1, ROWS, config.value_tile]
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, SHAPE, o_desc.layout)
    turns: gl.constexpr = None
    if config.PING_PONG:
        turns = allocate_barriers(SLOTS, 1)
    o = Output(o_desc, o_ptr, o_strides)
    bias = allocate_bias(bias_desc, SLOTS)
    shared = Forward(
        o, lse_ptr, max_ptr, q, o_tiles, k, v, landed, bias, turns, score, scales, work
    )
    run_partitions(query_tile, _load_tile, _attend, shared, config)


@gluon.constexpr_function
def is_fp8(dtype):
    """Whether q, k and v are 8-bit with scales; tiles of v are then [D, BLOCK_N]."""
    return dtype == gl.float8e4nv


@gluon.constexpr_function
def weight_shift(dtype):
    """Weights reach 2 to this power, as e4m3 covers only a limited range below 448."""
    return 8 if is_fp8(dtype) else 0


@gluon.constexpr_function
def weight_slack(dtype, slack):
    """SLACK of `online_step`, as far as the dtype permits."""
    return 0 if is_fp8(dtype) else slack


@gluon.jit
def head_scales(scales, scale, tile, work):
    """Scale of a head's scores, including q's and k's, and the scale of its v."""
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scales
    H, G, b = work.H, work.G, tile.row.b
    of_keys = b * (H // G) + tile.h // G
    scale *= gl.load(q_scale_ptr + b * H + tile.h) * gl.load(k_scale_ptr + of_keys)
    # The scales of two zero heads multiply to 0 in fp32, and 0 times -inf is NaN. NaN stays NaN.
    scale = gl.where(scale < _SMALLEST, _SMALLEST, scale)
    return scale, gl.load(v_scale_ptr + of_keys)
