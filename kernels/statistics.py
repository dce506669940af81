"""What the weights of attention look like, without a tensor of all of them.

With p_ij the weight of key j for query i: the entropy of each row, -sum_j p_ij ln p_ij; what each
key receives, sum_i p_ij; the largest weights of each row and their keys; and, for shapes where that
is small, the weights themselves. All are computed again from scores and lse, as backward does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import launch_forward
from .launch.arguments import (
    aligned,
    block_dim,
    dot_precision,
    index_type,
    kernel_score,
    key_programs,
    query_programs,
    sizes,
    strides,
    tile_for,
)
from .launch.block_sparsity import mask_for_keys, mask_for_queries
from .launch.tiles import TileConfig
from .rules.mask import (
    any_key,
    batch_row,
    full_block,
    key_plan,
    masked_block,
    query_plan,
    valid_keys,
    visible,
    worth_loading,
)
from .rules.product import rows_by_rows
from .rules.relative import relative_products, relative_query, vectors_of_tile
from .rules.score import modified
from .rules.score_gradient import load_lse
from .rules.softmax import LN2, LOG2E, weights
from .rules.tile import head, key_program, load_tile, query_program, query_rows

if TYPE_CHECKING:
    from fastattn.options import Options

# A position that no key has; the empty places of a list count down from it.
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _block_weights(
    q, query, lse, k_ptr, k_stride, m_first, n_first, valid, keep, h, H_q, row, score,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in log2 units, -inf where hidden, and weights [BLOCK_M, BLOCK_N] of one key block."""
    BLOCK_M: tl.constexpr = q.shape[0]
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    s = rows_by_rows(q, k, PRECISION)
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(
            m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N, D, BLOCK_D
        )
        s += relative_products(query, vectors, BLOCK_N, PRECISION)
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    x, factor, _, _ = modified(s, rows[:, None], k_pos[None, :], h, row, score)
    p = weights(x, lse[:, None], factor)
    x = x * factor
    if keep is not None:
        p = tl.where(keep, p, 0.0)
        x = tl.where(keep, x, float("-inf"))
    return x, p


@triton.jit
def _largest(x, k_pos):
    """The largest x of each row and the lowest position that has it; k_pos broadcasts to x."""
    best = tl.max(x, 1)
    return best, tl.min(tl.where(x == best[:, None], k_pos, _NOWHERE), 1)


@triton.jit
def _contest(x, k_pos, top_x, top_pos):
    """What a block offers the list of each row, what the list would give up, whether it should."""
    best, best_pos = _largest(x, k_pos)
    worst = tl.min(top_x, 1)
    worst_pos = tl.max(tl.where(top_x == worst[:, None], top_pos, -1), 1)
    better = (best > worst) | ((best == worst) & (best_pos < worst_pos))
    return best, best_pos, worst, worst_pos, better & (best > float("-inf"))


@triton.jit
def _into_top(x, k_pos, top_x, top_pos):
    """Lists [BLOCK_M, PLACES] of largest scores, in no order, after a block of scores x.

    One score a row enters with each turn, and turns end when none does: after the first blocks
    there are few.
    """
    best, best_pos, worst, worst_pos, enters = _contest(x, k_pos, top_x, top_pos)
    while tl.max(enters.to(tl.int32), 0) != 0:
        place = (top_x == worst[:, None]) & (top_pos == worst_pos[:, None]) & enters[:, None]
        top_x = tl.where(place, best[:, None], top_x)
        top_pos = tl.where(place, best_pos[:, None], top_pos)
        x = tl.where(k_pos == best_pos[:, None], float("-inf"), x)
        best, best_pos, worst, worst_pos, enters = _contest(x, k_pos, top_x, top_pos)
    return top_x, top_pos


@triton.jit
def _into_rows(
    entropy, top_x, top_pos, q, query, lse, k_ptr, k_stride, m_first, n_first, valid, keep, h, H_q,
    row, score,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into what is told of the rows; valid = keep = None for a full block."""
    x, p = _block_weights(
        q, query, lse, k_ptr, k_stride, m_first, n_first, valid, keep, h, H_q, row, score,
        D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    # A weight of 0 adds nothing, though its logarithm is -inf.
    surprise = tl.where(p > 0, lse[:, None] - x * LN2, 0.0)
    entropy += tl.sum(p * surprise, 1)
    if top_x.shape[1] > 1:
        k_pos = n_first + tl.arange(0, BLOCK_N)
        top_x, top_pos = _into_top(x, k_pos[None, :], top_x, top_pos)
    return entropy, top_x, top_pos


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k", "top"])
def attention_row_statistics_kernel(
    q_ptr, k_ptr, lse_ptr, entropy_ptr, top_ptr, position_ptr, q_strides, k_strides, mask, score,
    H_q, G, T_q, T_k, top,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Entropy and the `top` largest weights of a tile of queries. Grid and loops as forward's.

    PLACES: of the list of each row, a power of two; 1 leaves the lists out.
    """
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    q_ptr, q_stride = head(q_ptr, b, h_q, 0, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, b, h_k, 0, k_strides, INDEX)
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    query = relative_query(q, b, h_q, 0, m_first, in_rows, score, D, BLOCK_D, INDEX)
    stats = (b * H_q + h_q).to(tl.int64) * T_q + rows
    lse = load_lse(lse_ptr + stats, in_rows, score)

    entropy = tl.zeros([BLOCK_M], tl.float32)
    # Places past the first `top` are full for good.
    places = tl.arange(0, PLACES)[None, :] + tl.zeros([BLOCK_M, PLACES], tl.int32)
    top_x = tl.where(places < top, float("-inf"), float("inf"))
    top_pos = _NOWHERE - places
    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        entropy, top_x, top_pos = _into_rows(
            entropy, top_x, top_pos, q, query, lse, k_ptr, k_stride, m_first,
            full_block(i, place, mask) * BLOCK_N, None, None, h_q, H_q, row, score,
            D, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            entropy, top_x, top_pos = _into_rows(
                entropy, top_x, top_pos, q, query, lse, k_ptr, k_stride, m_first, n_first, valid,
                keep, h_q, H_q, row, score, D, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip

    if score.sinks_ptr is not None:
        sink = tl.load(score.sinks_ptr + h_q).to(tl.float32)
        p = weights(sink, lse, LOG2E)
        entropy += tl.where(p > 0, p * (lse - sink), 0.0)
    tl.store(entropy_ptr + stats, entropy, mask=in_rows)
    top_x = tl.where(places < top, top_x, float("-inf"))
    for i in range(0, top):
        best, best_pos = _largest(top_x, top_pos)
        found = best > float("-inf")
        weight = tl.where(found, weights(best, lse, 1.0), 0.0)
        tl.store(top_ptr + stats * top + i, weight, mask=in_rows)
        tl.store(position_ptr + stats * top + i, tl.where(found, best_pos, -1), mask=in_rows)
        top_x = tl.where(top_pos == best_pos[:, None], float("-inf"), top_x)


@triton.jit
def _into_keys(
    received, k, q_ptr, q_stride, lse_ptr, b, m_first, n_first, in_rows, keep, h, H_q, row, score,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """received += the weights of one query block, transposed as in dK/dV: keys down."""
    BLOCK_N: tl.constexpr = k.shape[0]
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    lse = load_lse(lse_ptr + rows, in_rows, score)
    s = rows_by_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    if score.keys_ptr is not None:
        query = relative_query(q, b, h, 0, m_first, in_rows, score, D, BLOCK_D, INDEX)
        vectors = vectors_of_tile(
            m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N, D, BLOCK_D
        )
        s += tl.trans(relative_products(query, vectors, BLOCK_N, PRECISION))
    x, factor, _, _ = modified(s, rows[None, :], k_pos[:, None], h, row, score)
    p = weights(x, lse[None, :], factor)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    return received + tl.sum(p, 1)


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_received_kernel(
    q_ptr, k_ptr, lse_ptr, received_ptr, q_strides, k_strides, mask, score, H_q, G, T_q, T_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile of keys receives from one query head. Grid as dK/dV's, for every query head."""
    tile, b, h_q = key_program(T_k, H_q, mask, BLOCK_N)
    n_first = tile * BLOCK_N
    row = batch_row(b, T_q, T_k, mask)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    valid = valid_keys(k_pos, row, mask)
    q_ptr, q_stride = head(q_ptr, b, h_q, 0, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, b, h_q // G, 0, k_strides, INDEX)
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    lse_ptr += (b * H_q + h_q).to(tl.int64) * T_q

    received = tl.zeros([BLOCK_N], tl.float32)
    k_first = tl.maximum(n_first, row.start)
    k_last = tl.minimum(n_first + BLOCK_N, row.end) - 1
    if any_key(valid):
        full, boundary, place = query_plan(tile, k_first, k_last, h_q, row, mask, BLOCK_M)
        for i in range(0, full):
            received = _into_keys(
                received, k, q_ptr, q_stride, lse_ptr, b, full_block(i, place, mask) * BLOCK_M,
                n_first, None, None, h_q, H_q, row, score, D, BLOCK_M, BLOCK_D, INDEX, PRECISION,
            )  # fmt: skip
        for i in range(0, boundary):
            m_first = masked_block(i, place, mask) * BLOCK_M
            rows = m_first + tl.arange(0, BLOCK_M)
            keep = visible(rows[None, :], k_pos[:, None], h_q, row, mask)
            received = _into_keys(
                received, k, q_ptr, q_stride, lse_ptr, b, m_first, n_first, rows < row.T_q, keep,
                h_q, H_q, row, score, D, BLOCK_M, BLOCK_D, INDEX, PRECISION,
            )  # fmt: skip
    # A block without a mask reads keys that do not exist as 0: those have a weight too.
    received = tl.where(valid, received, 0.0)
    stats = (b * H_q + h_q).to(tl.int64) * T_k + k_pos
    tl.store(received_ptr + stats, received, mask=k_pos < T_k)


@triton.jit
def _store_block(
    weights_ptr, q, query, lse, k_ptr, k_stride, m_first, n_first, in_rows, valid, keep, h, H_q,
    row, score,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the weights of one key block into the rows [T_q, T_k] of a head."""
    BLOCK_M: tl.constexpr = q.shape[0]
    _, p = _block_weights(
        q, query, lse, k_ptr, k_stride, m_first, n_first, valid, keep, h, H_q, row, score,
        D, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    rows = (m_first + tl.arange(0, BLOCK_M)).to(tl.int64)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    pointers = weights_ptr + rows[:, None] * row.T_k + k_pos[None, :]
    tl.store(pointers, p, mask=in_rows[:, None] & (k_pos < row.T_k)[None, :])


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_weights_kernel(
    q_ptr, k_ptr, lse_ptr, weights_ptr, q_strides, k_strides, mask, score, H_q, G, T_q, T_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of a tile of queries; blocks that no query sees are not written. Grid as forward."""
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    q_ptr, q_stride = head(q_ptr, b, h_q, 0, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, b, h_k, 0, k_strides, INDEX)
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    query = relative_query(q, b, h_q, 0, m_first, in_rows, score, D, BLOCK_D, INDEX)
    first_row = (b * H_q + h_q).to(tl.int64) * T_q
    lse = load_lse(lse_ptr + first_row + rows, in_rows, score)
    weights_ptr += first_row * T_k
    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        _store_block(
            weights_ptr, q, query, lse, k_ptr, k_stride, m_first,
            full_block(i, place, mask) * BLOCK_N, in_rows, None, None, h_q, H_q, row, score,
            D, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            _store_block(
                weights_ptr, q, query, lse, k_ptr, k_stride, m_first, n_first, in_rows, valid,
                keep, h_q, H_q, row, score, D, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip


def launch_lse(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """lse as forward's, fp32 [B, H_q, T_q], at the price of the scores: values of 16 bytes."""
    v = k[..., : 16 // k.element_size()]
    return launch_forward(q, k, v, options)[1]


def launch_row_statistics(
    q: Tensor, k: Tensor, lse: Tensor, options: Options, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy fp32 [B, H_q, T_q]; largest weights fp32 and their keys int64 [B, H_q, T_q, top].

    q, k and options as `launch_forward` takes them, dense and without dropout; lse as it gives it,
    contiguous.
    """
    q, k = aligned(q), aligned(k)
    B, H_q, T_q, _ = q.shape
    entropy = torch.empty(B, H_q, T_q, dtype=torch.float32, device=q.device)
    largest = torch.empty(B, H_q, T_q, top, dtype=torch.float32, device=q.device)
    positions = torch.empty(B, H_q, T_q, top, dtype=torch.int64, device=q.device)
    tile = tile_for("backward_dq", options, q, block_dim(q.shape[3]))
    if programs := query_programs(options, q, tile.BLOCK_M):
        attention_row_statistics_kernel[(programs,)](
            q, k, lse, entropy, largest, positions, strides(q), strides(k),
            mask_for_queries(options, q, k, tile), kernel_score(options, q.dtype), *sizes(q, k),
            top, *_constants(q, k, tile, options), _places(top),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return entropy, largest, positions


def _constants(q: Tensor, k: Tensor, tile: TileConfig, options: Options) -> tuple[Any, ...]:
    """From D to PRECISION, in the kernels' order."""
    D = q.shape[3]
    index = index_type(q, k, options.relative_query)
    return D, tile.BLOCK_M, tile.BLOCK_N, block_dim(D), index, dot_precision(q.dtype)


def _places(top: int) -> int:
    return max(2, triton.next_power_of_2(top)) if top else 1


def launch_received(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """fp32 [B, H_q, T_k]; arguments as for `launch_row_statistics`."""
    q, k = aligned(q), aligned(k)
    B, H_q, _, _ = q.shape
    received = torch.empty(B, H_q, k.shape[2], dtype=torch.float32, device=q.device)
    tile = tile_for("backward_dkv", options, q, block_dim(q.shape[3]))
    if programs := key_programs(options, received[..., None], tile.BLOCK_N):
        attention_received_kernel[(programs,)](
            q, k, lse, received, strides(q), strides(k),
            mask_for_keys(options, q, k, tile), kernel_score(options, q.dtype), *sizes(q, k),
            *_constants(q, k, tile, options),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return received


def launch_weights(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """fp32 [B, H_q, T_q, T_k]; arguments as for `launch_row_statistics`."""
    q, k = aligned(q), aligned(k)
    B, H_q, T_q, _ = q.shape
    found = torch.zeros(B, H_q, T_q, k.shape[2], dtype=torch.float32, device=q.device)
    # Addresses of the weights take as many registers as a mask.
    tile = tile_for("backward_dq", options, q, block_dim(q.shape[3]), calls="masked")
    if programs := query_programs(options, q, tile.BLOCK_M):
        attention_weights_kernel[(programs,)](
            q, k, lse, found, strides(q), strides(k),
            mask_for_queries(options, q, k, tile), kernel_score(options, q.dtype), *sizes(q, k),
            *_constants(q, k, tile, options),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return found
