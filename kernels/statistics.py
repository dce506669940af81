"""Statistics of attention weights, without a tensor of all of them.

With p_ij the weight of key j for query i: each row's entropy, -sum_j p_ij ln p_ij, and mean
distance, sum_j p_ij |p - j|; the total weight of each key, sum_i p_ij; the largest weights of each
row and their keys; and, for small shapes, the weights themselves. All are recomputed from scores
and lse, as in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import launch_forward
from .launch.arguments import (
    aligned,
    block_dim,
    constants,
    key_programs,
    launch_tiles,
    query_programs,
    rules,
    strided,
    tile_for,
)
from .launch.block_sparsity import mask_for_keys, mask_for_queries
from .launch.tiles import TileConfig
from .rules.blocks import (
    key_head,
    key_tile,
    load_queries,
    over_key_blocks,
    over_query_blocks,
    query_tile,
)
from .rules.mask import any_key
from .rules.operands import head_at
from .rules.product import rows_by_rows
from .rules.relative import relative_products, relative_query, vectors_of_tile
from .rules.score import distances, modified
from .rules.score_gradient import load_lse
from .rules.softmax import LN2, LOG2E, weights
from .rules.tile import load_block, load_tile

if TYPE_CHECKING:
    from ..options import Options

# Position of no key; empty entries of a list count down from it.
_NOWHERE = tl.constexpr(2**31 - 1)


class _Operands(NamedTuple):
    """Operands of a loop over key blocks: q, its lse, and the query of relative keys."""

    q: Any
    query: Any
    lse: Any
    k: Any


@triton.jit
def _load_operands(q, k, lse_ptr, tile, score, const: tl.constexpr):
    q = load_queries(q.ptr, q.strides, tile, const.BLOCK_D, const.D, const)
    query = relative_query(q, tile.batch, tile.h, 0, tile.first, tile.in_rows, score, const)
    lse = load_lse(lse_ptr + tile.statistics + tile.rows, tile.in_rows, score)
    return _Operands(q, query, lse, key_head(k.ptr, k.strides, tile, const))


@triton.jit
def _block_weights(n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Scores in log2 units, -inf where masked, and weights [BLOCK_M, BLOCK_N] of a key block."""
    PRECISION: tl.constexpr = const.PRECISION
    q, query, lse, k = operands
    k = load_block(k, n_first, valid, const.BLOCK_N, const.BLOCK_D, const.D)
    s = rows_by_rows(q, k, PRECISION)
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(tile.first, n_first, tile.h, tile.H_q, tile.row, score, const)
        s += relative_products(query, vectors, const.BLOCK_N, PRECISION)
    k_pos = (n_first + tl.arange(0, const.BLOCK_N))[None, :]
    x, factor, _, _ = modified(s, tile.rows[:, None], k_pos, tile.h, tile.row, score)
    p = weights(x, lse[:, None], factor)
    x = x * factor
    if keep is not None:
        p = tl.where(keep, p, 0.0)
        x = tl.where(keep, x, float("-inf"))
    return x, p


@triton.jit
def _largest(x, k_pos):
    """The largest x of each row and its lowest position; k_pos broadcasts to x."""
    best = tl.max(x, 1)
    return best, tl.min(tl.where(x == best[:, None], k_pos, _NOWHERE), 1)


@triton.jit
def _contest(x, k_pos, top_x, top_pos):
    """Compare a block with each row's list: best candidate, weakest entry, whether to swap."""
    best, best_pos = _largest(x, k_pos)
    worst = tl.min(top_x, 1)
    worst_pos = tl.max(tl.where(top_x == worst[:, None], top_pos, -1), 1)
    better = (best > worst) | ((best == worst) & (best_pos < worst_pos))
    return best, best_pos, worst, worst_pos, better & (best > float("-inf"))


@triton.jit
def _into_top(x, k_pos, top_x, top_pos):
    """Update the unordered lists [BLOCK_M, PLACES] of largest scores by a block of scores x.

    Each iteration inserts one score per row, until none is inserted: few iterations after the first
    blocks.
    """
    best, best_pos, worst, worst_pos, enters = _contest(x, k_pos, top_x, top_pos)
    while tl.max(enters.to(tl.int32), 0) != 0:
        worst_entry = (top_x == worst[:, None]) & (top_pos == worst_pos[:, None]) & enters[:, None]
        top_x = tl.where(worst_entry, best[:, None], top_x)
        top_pos = tl.where(worst_entry, best_pos[:, None], top_pos)
        x = tl.where(k_pos == best_pos[:, None], float("-inf"), x)
        best, best_pos, worst, worst_pos, enters = _contest(x, k_pos, top_x, top_pos)
    return top_x, top_pos


@triton.jit
def _into_rows(state, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Add one key block to the rows' statistics: see `blocks.over_key_blocks`."""
    entropy, distance, top_x, top_pos = state
    x, p = _block_weights(n_first, valid, keep, tile, operands, score, const)
    # A weight of 0 adds 0, although its logarithm is -inf.
    surprise = tl.where(p > 0, operands.lse[:, None] - x * LN2, 0.0)
    entropy += tl.sum(p * surprise, 1)
    k_pos = n_first + tl.arange(0, const.BLOCK_N)
    ahead = tile.row.offset - tile.row.shift
    distance += tl.sum(p * distances(tile.rows[:, None], k_pos[None, :], ahead, None), 1)
    if top_x.shape[1] > 1:
        top_x, top_pos = _into_top(x, k_pos[None, :], top_x, top_pos)
    return entropy, distance, top_x, top_pos


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k", "top"])
def attention_row_statistics_kernel(
    q, k, lse_ptr, entropy_ptr, distance_ptr, top_ptr, position_ptr, mask, score, H_q, G, T_q, T_k,
    top, const: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Entropy, distance and the `top` largest weights of a tile of queries; grid as forward.

    PLACES: size of each row's list, a power of two; 1 = no lists.
    """
    BLOCK_M: tl.constexpr = const.BLOCK_M
    tile = query_tile(H_q, G, T_q, T_k, mask, BLOCK_M)
    operands = _load_operands(q, k, lse_ptr, tile, score, const)
    lse = operands.lse

    entropy = tl.zeros([BLOCK_M], tl.float32)
    # Entries past the first `top` are permanently full.
    places = tl.arange(0, PLACES)[None, :] + tl.zeros([BLOCK_M, PLACES], tl.int32)
    top_x = tl.where(places < top, float("-inf"), float("inf"))
    top_pos = _NOWHERE - places
    distance = tl.zeros([BLOCK_M], tl.float32)
    entropy, distance, top_x, top_pos = over_key_blocks(
        _into_rows, (entropy, distance, top_x, top_pos), tile, operands, mask, score, const
    )

    if score.sinks_ptr is not None:
        sink = tl.load(score.sinks_ptr + tile.h).to(tl.float32)
        p = weights(sink, lse, LOG2E)
        entropy += tl.where(p > 0, p * (lse - sink), 0.0)
    stats = tile.statistics + tile.rows
    tl.store(entropy_ptr + stats, entropy, mask=tile.in_rows)
    tl.store(distance_ptr + stats, distance, mask=tile.in_rows)
    top_x = tl.where(places < top, top_x, float("-inf"))
    for i in range(0, top):
        best, best_pos = _largest(top_x, top_pos)
        exists = best > float("-inf")
        weight = tl.where(exists, weights(best, lse, 1.0), 0.0)
        tl.store(top_ptr + stats * top + i, weight, mask=tile.in_rows)
        tl.store(position_ptr + stats * top + i, tl.where(exists, best_pos, -1), mask=tile.in_rows)
        top_x = tl.where(top_pos == best_pos[:, None], float("-inf"), top_x)


@triton.jit
def _into_keys(received, m_first, in_rows, keep, h, tile, operands, score, const: tl.constexpr):
    """received += the weights of one query block: see `blocks.over_query_blocks`.

    Transposed as in dK/dV: keys down. operands: k, the `operands.Head` of q, and lse_ptr.
    """
    PRECISION: tl.constexpr = const.PRECISION
    k, q, lse_ptr = operands
    BLOCK_M: tl.constexpr = const.BLOCK_M
    rows = m_first + tl.arange(0, BLOCK_M)
    q = load_block(q, m_first, in_rows, BLOCK_M, const.BLOCK_D, const.D)
    lse = load_lse(lse_ptr + rows, in_rows, score)
    s = rows_by_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    if score.keys_ptr is not None:
        query = relative_query(q, tile.batch, h, 0, m_first, in_rows, score, const)
        vectors = vectors_of_tile(m_first, tile.first, h, tile.H_q, tile.row, score, const)
        s += tl.trans(relative_products(query, vectors, const.BLOCK_N, PRECISION))
    x, factor, _, _ = modified(s, rows[None, :], tile.k_pos[:, None], h, tile.row, score)
    p = weights(x, lse[None, :], factor)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    return received + tl.sum(p, 1)


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_received_kernel(
    q, k, lse_ptr, received_ptr, mask, score, H_q, G, T_q, T_k, const: tl.constexpr
):
    """Sum the weights that a tile of keys receives from a query head. Grid as dK/dV, for H_q."""
    BLOCK_N: tl.constexpr = const.BLOCK_N
    tile = key_tile(H_q, H_q, T_q, T_k, mask, BLOCK_N)
    h = tile.h_k
    b = tile.batch
    q = head_at(q.ptr, b, h, 0, q.strides, const)
    k = head_at(k.ptr, b, h // G, 0, k.strides, const)
    k = load_tile(k, tile.first, tile.valid, BLOCK_N, const.BLOCK_D, const.D)
    lse_ptr += (b * H_q + h).to(tl.int64) * T_q

    received = tl.zeros([BLOCK_N], tl.float32)
    if any_key(tile.valid):
        operands = (k, q, lse_ptr)
        received = over_query_blocks(
            _into_keys, received, h, tile, operands, None, mask, score, const
        )
    # Unmasked blocks load nonexistent keys as 0, which get a weight too.
    received = tl.where(tile.valid, received, 0.0)
    stats = (b * H_q + h).to(tl.int64) * T_k + tile.k_pos
    tl.store(received_ptr + stats, received, mask=tile.k_pos < T_k)


@triton.jit
def _store_block(weights_ptr, n_first, valid, keep, tile, operands, score, const: tl.constexpr):
    """Write the weights of a key block to the rows [T_q, T_k] of a head.

    The state of `blocks.over_key_blocks` is the pointer to them.
    """
    _, p = _block_weights(n_first, valid, keep, tile, operands, score, const)
    k_pos = n_first + tl.arange(0, const.BLOCK_N)
    pointers = weights_ptr + tile.rows.to(tl.int64)[:, None] * tile.row.T_k + k_pos[None, :]
    tl.store(pointers, p, mask=tile.in_rows[:, None] & (k_pos < tile.row.T_k)[None, :])
    return weights_ptr


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_weights_kernel(
    q, k, lse_ptr, weights_ptr, mask, score, H_q, G, T_q, T_k, const: tl.constexpr
):
    """Weights of a tile of queries; blocks that no query sees are not written. Grid as forward."""
    tile = query_tile(H_q, G, T_q, T_k, mask, const.BLOCK_M)
    operands = _load_operands(q, k, lse_ptr, tile, score, const)
    weights_ptr += tile.statistics * T_k
    over_key_blocks(_store_block, weights_ptr, tile, operands, mask, score, const)


def launch_lse(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """lse of forward, fp32 [B, H_q, T_q], for little more than the scores: with 16-byte values."""
    v = k[..., : 16 // k.element_size()]
    return launch_forward(q, k, v, options)[1]


def launch_row_statistics(
    q: Tensor, k: Tensor, lse: Tensor, options: Options, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy and distance fp32 [B, H_q, T_q]; largest weights fp32 and their keys int64, each
    [B, H_q, T_q, top].

    q, k and options as in `launch_forward`, dense and without dropout; its lse, contiguous.
    """
    B, H_q, T_q, _ = q.shape
    entropy = q.new_empty(B, H_q, T_q, dtype=torch.float32)
    largest = q.new_empty(B, H_q, T_q, top, dtype=torch.float32)
    positions = q.new_empty(B, H_q, T_q, top, dtype=torch.int64)
    results, tile = (
        (entropy, torch.empty_like(entropy), largest, positions),
        _tile("backward_dq", options, q),
    )
    programs = query_programs(options, q, tile.BLOCK_M)
    kernel, mask = attention_row_statistics_kernel, mask_for_queries
    _launch(kernel, programs, tile, mask, q, k, lse, results, options, (top,), (_places(top),))
    return results


def _places(top: int) -> int:
    return max(2, triton.next_power_of_2(top)) if top else 1


def launch_received(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """fp32 [B, H_q, T_k]; arguments as for `launch_row_statistics`."""
    received = q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
    tile = _tile("backward_dkv", options, q)
    programs = key_programs(options, received[..., None], tile.BLOCK_N)
    kernel, mask = attention_received_kernel, mask_for_keys
    _launch(kernel, programs, tile, mask, q, k, lse, (received,), options)
    return received


def launch_weights(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """fp32 [B, H_q, T_q, T_k]; arguments as for `launch_row_statistics`."""
    received = q.new_zeros(*q.shape[:3], k.shape[2], dtype=torch.float32)
    # Addresses of the weights take as many registers as a mask.
    tile = _tile("backward_dq", options, q, calls="masked")
    programs = query_programs(options, q, tile.BLOCK_M)
    kernel, mask = attention_weights_kernel, mask_for_queries
    _launch(kernel, programs, tile, mask, q, k, lse, (received,), options)
    return received


def _tile(kernel: str, options: Options, q: Tensor, **how: Any) -> TileConfig:
    return tile_for(kernel, options, q, block_dim(q.shape[3]), **how)


def _launch(
    kernel: Any,
    programs: int,
    tile: TileConfig,
    mask_for: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    outputs: tuple[Tensor, ...],
    options: Options,
    numbers: tuple[int, ...] = (),
    constexprs: tuple[int, ...] = (),
) -> None:
    """Launch a kernel that writes statistics of q and k, if there are programs."""
    if programs:
        q, k = aligned(q), aligned(k)
        given = (*rules(options, mask_for(options, q, k, tile), q, k), *numbers)
        const = constants(tile, q.shape[3], 0, q.dtype, q, k, options.relative_query)
        operands = (strided(q), strided(k), lse, *outputs)
        launch_tiles(kernel, programs, tile, *operands, *given, const, *constexprs)
