"""Forward for Hopper: one producer warp loads, consumer warpgroups of 64 queries multiply.

A consumer issues Q K^T of the next block before it takes the softmax of this one, and the softmax
overlaps with P V of the block before. README.md draws it. The same step serves 16 bits and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..launch.arguments import empty_in_layout, kernel_mask, kernel_score, tiles_of
from ..rules.score import Score, first_state, modified
from ..rules.softmax import finish, online_step
from .band import block_number, sees
from .host import describe, end_early, heads_in_l2, multiprocessors, rows_of, tile_order
from .pipeline import (
    ROWS,
    accumulator_layout,
    allocate_barriers,
    allocate_ring,
    as_operand,
    load,
    load_slot,
    load_until,
    pass_turn,
    release,
    release_slot,
    send,
    take_turn,
    tile_of,
    wait_full,
    wait_slot,
)
from .schedule import number_of_tiles, query_tile
from .tile_table import HopperConfig, forward_config, fp8_config

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fastattn.options import Options

_SMALLEST = gl.constexpr(2.0**-126)


@gluon.jit
def _produce(
    inputs, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """Load the queries of each tile, and its K and V blocks in the order they are used."""
    _order, _T_q, _T_k, _H_q, mask, total = inputs[-1]
    done = 0
    n = 0
    scrubs = 0
    for i in range(number_of_tiles(total)):
        tile = query_tile(i, inputs[-1], CONSUMERS * ROWS, BLOCK_N)
        if mask.cu_q_ptr is None or tile[1] < tile[2].T_q:
            n, scrubs = _load_tile(inputs, tile, done, n, scrubs, CONSUMERS, BLOCK_N, D, STAGES)
            done += 1


@gluon.jit
def _load_tile(
    inputs, tile, i, n, scrubs,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The i-th tile that there is; n and scrubs go on, see `load_until`."""
    q_desc, k_desc, v_desc, queries, k_ring, v_ring, landed, G, work = inputs
    _order, _T_q, _T_k, _H_q, mask, _total = work
    EARLY: gl.constexpr = mask.lengths_ptr is not None or mask.cu_k_ptr is not None
    TURNED: gl.constexpr = is_fp8(v_desc.dtype)
    h, first, row, memory, plan = tile
    b, first_q, first_k = memory
    masked, blocks, at = plan
    load_slot(queries, i, q_desc, b, h, first_q + first, 0)
    for j in range(blocks):
        key = block_number(j, masked, at, mask) * BLOCK_N
        load(k_ring, n, k_desc, b, h // G, first_k + key, STAGES)
        if j == 0:
            for consumer in gl.static_range(1, CONSUMERS):
                load_slot(queries, i, q_desc, b, h, first_q + first, consumer)
        scrubs = load_until(
            v_ring, n, v_desc, b, h // G, first_k + key, row.end - key, landed, scrubs,
            BLOCK_N, D, STAGES, EARLY, TURNED,
        )  # fmt: skip
        n += 1
    return n, scrubs


@gluon.constexpr_function
def is_fp8(dtype):
    """Whether q, k and v are of 8 bits, with scales: the tiles of v are [D, BLOCK_N] then."""
    return dtype == gl.float8e4nv


@gluon.constexpr_function
def weight_shift(dtype):
    """Weights reach 2 to this power. e4m3 ends at 448, and what is far below is lost to it."""
    return 8 if is_fp8(dtype) else 0


@gluon.jit
def _start_scores(q, k_ring, n, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Issue Q K^T of the n-th block; its tile has arrived."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N, q.dtype))
    k = tile_of(k_ring, n, BLOCK_N, D, STAGES).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _waiting(weights, dtype: gl.constexpr, D: gl.constexpr):
    """Weights as they wait for their product: as its operand, but in fp32 before 8 bits.

    Through a loop every byte of an operand would go in a register of its own, to be packed anew.
    """
    p = weights
    if not is_fp8(dtype):
        p = as_operand(weights, dtype, D)
    return p


@gluon.jit
def _start_values(
    acc, p, v_ring, n, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Issue acc + P V of the n-th block, whose tile has arrived; p is as `_waiting` left it."""
    dtype: gl.constexpr = v_ring[0].dtype
    if is_fp8(dtype):
        p = as_operand(p, dtype, D)
        # Of 8 bits the second operand, too, has to have contiguous columns.
        v = tile_of(v_ring, n, D, BLOCK_N, STAGES).permute((1, 0))
    else:
        v = tile_of(v_ring, n, BLOCK_N, D, STAGES)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _scores(
    s, rows, key, h, row, mask, score,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The scores of s = q.k, -inf where hidden, and the factor to log2 units: see `modified`."""
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N, dtype)
    cols = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    s, factor, _before, _capped = modified(s, rows[:, None], cols[None, :], h, row, score)
    if MASKED:
        s = gl.where(sees(rows[:, None], cols[None, :], h, row, mask), s, float("-inf"))
    return s, factor


@gluon.jit
def _step(
    acc, p, m, l, q, k_ring, v_ring, turns, n, more, rows, key, h, row, mask, score,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, TURNS: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of block n and values of block n - 1, whose weights are p, at the same time."""
    dtype: gl.constexpr = q.dtype
    take_turn(turns, n, CONSUMER, TURNS)
    s = _start_scores(q, k_ring, n, BLOCK_N, D, STAGES)
    wait_full(v_ring, n - 1, True, STAGES)
    acc_next = _start_values(acc, p, v_ring, n - 1, BLOCK_N, D, STAGES)
    pass_turn(turns, CONSUMER, TURNS)
    s = warpgroup_mma_wait(1, deps=[s])
    release(k_ring, n, STAGES)
    s, factor = _scores(s, rows, key, h, row, mask, score, MASKED, BLOCK_N, dtype)
    weights, rescale, m, l = online_step(s, m, l, factor, MASKED, weight_shift(dtype))
    # Between the softmax and the wait for P V there has to be a branch: without one ptxas moves
    # that wait ahead of the exponentials, and nothing overlaps. The wait for the next keys is one.
    wait_full(k_ring, n + 1, more, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    release(v_ring, n - 1, STAGES)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, accumulator_layout(D, dtype)))[:, None]
    return acc, _waiting(weights, dtype, D), m, l


@gluon.jit
def _consume(
    outputs, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, O_APART: gl.constexpr,
):  # fmt: skip
    """o and lse of 64 queries of each tile."""
    _order, _T_q, _T_k, _H_q, mask, total = outputs[-1]
    done = 0
    n = 0
    for i in range(number_of_tiles(total)):
        tile = query_tile(i, outputs[-1], CONSUMERS * ROWS, BLOCK_N)
        if mask.cu_q_ptr is None or tile[1] < tile[2].T_q:
            n = _attend(outputs, tile, done, n, CONSUMER, TURNS, BLOCK_N, D, STAGES, O_APART)
            done += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _attend(
    outputs, tile, i, n, CONSUMER: gl.constexpr, TURNS: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, O_APART: gl.constexpr,
):  # fmt: skip
    """The i-th tile that there is, whose first block is the n-th; returns the n of the next."""
    o_desc, o_rows, lse_ptr, queries, o_tiles, k_ring, v_ring, turns, score, scales, work = outputs
    _order, T_q, _T_k, H_q, mask, _total = work
    dtype: gl.constexpr = queries[0].dtype
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N, dtype))
    O_LAYOUT: gl.constexpr = accumulator_layout(D, dtype)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q_tile = queries[0].index(CONSUMER)
    q = q_tile.reshape([ROWS, D])
    h, first, row, memory, plan = tile
    b, first_q, _first_k = memory
    masked, blocks, at = plan
    first += CONSUMER * ROWS
    rows = first + gl.arange(0, ROWS, layout=S_ROWS)
    m = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([ROWS], gl.float32, S_ROWS)
    m, l = first_state(h, m, l, score)
    if is_fp8(dtype):
        m = m - weight_shift(dtype)
        l = l * (1 << weight_shift(dtype))
        scale, v_scale = _scales(scales, score.scale, b, h, H_q)
        score = Score(scale, score.softcap, tensors=score.tensors)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)

    wait_slot(queries, i, CONSUMER)
    wait_full(k_ring, n, True, STAGES)
    take_turn(turns, n, CONSUMER, TURNS)
    s = _start_scores(q, k_ring, n, BLOCK_N, D, STAGES)
    pass_turn(turns, CONSUMER, TURNS)
    s = warpgroup_mma_wait(0, deps=[s])
    release(k_ring, n, STAGES)
    key = block_number(0, masked, at, mask) * BLOCK_N
    s, factor = _scores(s, rows, key, h, row, mask, score, True, BLOCK_N, dtype)
    weights, _rescale, m, l = online_step(s, m, l, factor, True, weight_shift(dtype))
    p = _waiting(weights, dtype, D)
    wait_full(k_ring, n + 1, blocks > 1, STAGES)
    for j in range(1, masked):
        key = block_number(j, masked, at, mask) * BLOCK_N
        acc, p, m, l = _step(
            acc, p, m, l, q, k_ring, v_ring, turns, n + j, j + 1 < blocks, rows, key,
            h, row, mask, score, True, CONSUMER, TURNS, BLOCK_N, D, STAGES,
        )  # fmt: skip
    for j in range(gl.maximum(masked, 1), blocks):
        key = block_number(j, masked, at, mask) * BLOCK_N
        acc, p, m, l = _step(
            acc, p, m, l, q, k_ring, v_ring, turns, n + j, j + 1 < blocks, rows, key,
            h, row, mask, score, False, CONSUMER, TURNS, BLOCK_N, D, STAGES,
        )  # fmt: skip
    n += blocks
    wait_full(v_ring, n - 1, True, STAGES)
    acc = _start_values(acc, p, v_ring, n - 1, BLOCK_N, D, STAGES)
    if O_APART:
        release_slot(queries, CONSUMER)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_ring, n - 1, STAGES)

    o, lse = finish(acc, gl.convert_layout(m, O_ROWS), gl.convert_layout(l, O_ROWS))
    if is_fp8(dtype):
        o = o * v_scale
    rows = first + gl.arange(0, ROWS, layout=O_ROWS)
    lse_row = lse_ptr + (b * H_q + h).to(gl.int64) * T_q + first_q
    gl.store(lse_row + rows, lse, mask=rows < row.T_q)
    o_tile = q_tile
    if O_APART:
        o_tile = o_tiles.index(CONSUMER)
        # The store of the tile before has had all this time.
        tma.store_wait(pendings=0)
    o_tile.reshape([ROWS, D]).store(o.to(o_desc.dtype))
    send(o_desc, o_tile, o_rows, b, h, first_q + first, row.T_q - first, D)
    if not O_APART:
        tma.store_wait(pendings=0)
        release_slot(queries, CONSUMER)
    return n


@gluon.jit
def _scales(scales, scale, b, h, H_q):
    """The scale of head h's scores, that of its q and k counted, and the scale of its v."""
    pointers, G = scales
    q_scale_ptr, k_scale_ptr, v_scale_ptr = pointers
    of_keys = b * (H_q // G) + h // G
    scale *= gl.load(q_scale_ptr + b * H_q + h) * gl.load(k_scale_ptr + of_keys)
    # Two heads of zeros come to less than fp32 has, and 0 times -inf is NaN, as NaN should be.
    scale = gl.where(scale < _SMALLEST, _SMALLEST, scale)
    return scale, gl.load(v_scale_ptr + of_keys)


@gluon.jit(do_not_specialize=[
    "T_q", "T_k", "H_q", "G", "total", "heads", "tiles", "group", "group_tiles",
])  # fmt: skip
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_rows, lse_ptr, mask, score, scales,
    T_q, T_k, H_q, G, total, heads, tiles, group, group_tiles,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, O_APART: gl.constexpr,
    PING_PONG: gl.constexpr,
):  # fmt: skip
    """Persistent grid of any size over `tiles` tiles of 64 * CONSUMERS queries of each head.

    o_rows: o and its strides where it holds packed sequences, else (None, None); see `send`.
    scales: those of q [B, H_q], k and v [B, H_k] where they are e4m3, else None. v_desc then is of
    v as `kernels.fp8_values` packs it.
    """
    # Dimensions of shared memory are powers of two.
    SLOTS: gl.constexpr = 4 if CONSUMERS == 3 else CONSUMERS
    q_ring = allocate_ring(q_desc, SLOTS, 1)
    k_ring = allocate_ring(k_desc, STAGES, CONSUMERS)
    v_ring = allocate_ring(v_desc, STAGES, CONSUMERS)
    landed = allocate_barriers(1, 1).index(0)  # see load_until
    o_tiles = q_ring[0]
    if O_APART:
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [SLOTS, 1, 1, ROWS, D], o_desc.layout)
    turns = landed
    if PING_PONG:
        turns = allocate_barriers(SLOTS, 1)
    TURNS: gl.constexpr = CONSUMERS if PING_PONG else 0
    work = ((heads, tiles, group, group_tiles), T_q, T_k, H_q, mask, total)
    inputs = (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, landed, G, work)
    outputs = (
        o_desc,
        o_rows,
        lse_ptr,
        q_ring,
        o_tiles,
        k_ring,
        v_ring,
        turns,
        score,
        (scales, G),
        work,
    )
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (outputs, 0, CONSUMERS, TURNS, BLOCK_N, D, STAGES, O_APART)),
            (_consume, (outputs, 1, CONSUMERS, TURNS, BLOCK_N, D, STAGES, O_APART)),
            (_produce, (inputs, CONSUMERS, BLOCK_N, D, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (outputs, 0, CONSUMERS, TURNS, BLOCK_N, D, STAGES, O_APART)),
            (_consume, (outputs, 1, CONSUMERS, TURNS, BLOCK_N, D, STAGES, O_APART)),
            (_consume, (outputs, 2, CONSUMERS, TURNS, BLOCK_N, D, STAGES, O_APART)),
            (_produce, (inputs, CONSUMERS, BLOCK_N, D, STAGES)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D] in q's dtype and memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], k and v [B, H_k, T_k, D], for which `why_not_hopper` is None.
    """
    config = forward_config(q.shape[3], end_early(options))
    o = empty_in_layout(q, *q.shape[1:])
    return o, _launch(q, k, describe(v, config.BLOCK), o, None, config, options)


def launch_hopper_forward_fp8(
    q: Tensor, k: Tensor, values: Tensor, scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`launch_hopper_forward` of e4m3 numbers, o in `dtype`: bfloat16 or float16.

    values: v as `kernels.fp8_values.launch_pack_values` leaves it. scales: of q [B, H_q], k and v
    [B, H_k], fp32 and contiguous.
    """
    _, H_q, T_q, D = q.shape
    config = fp8_config(D, end_early(options))
    o = empty_in_layout(q, H_q, T_q, D, dtype)
    v = describe(values, D, config.BLOCK)
    return o, _launch(q, k, v, o, scales, config, options)


def _launch(
    q: Tensor, k: Tensor, v: TensorDescriptor, o: Tensor,
    scales: tuple[Tensor, Tensor, Tensor] | None, config: HopperConfig, options: Options,
) -> Tensor:  # fmt: skip
    """Fill o; returns lse."""
    B, H_q, T_q, D = q.shape
    _, H_k, T_k, _ = k.shape
    lse = torch.empty(B, H_q, T_q, dtype=torch.float32, device=q.device)
    tiles = tiles_of(options.cu_seqlens_q, 1, T_q, ROWS.value * config.CONSUMERS)
    order = tile_order(B * H_q, tiles, heads_in_l2(k, k) * (H_q // H_k))
    if order[0]:
        hopper_forward_kernel[(min(order[0], multiprocessors(q.device)),)](
            describe(q, ROWS.value), describe(k, config.BLOCK), v,
            describe(o, ROWS.value), rows_of(o, options), lse, kernel_mask(options),
            kernel_score(options, q.dtype), scales, T_q, T_k, H_q, H_q // H_k, *order,
            D, config.BLOCK, config.STAGES, config.CONSUMERS,
            config.CONSUMER_REGISTERS, config.PRODUCER_REGISTERS, config.APART, config.PING_PONG,
            num_warps=4,
        )  # fmt: skip
    return lse
