"""Forward: o = softmax(score(q k^T), mask) v and lse, one program a tile of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import (
    aligned,
    block_dim,
    dot_precision,
    empty_in_layout,
    index_type,
    kernel_score,
    query_programs,
    sizes,
    strides,
    tile_for,
)
from .launch.block_sparsity import mask_for_queries
from .launch.launches import Launch, launch_for
from .rules.mask import (
    batch_row,
    full_block,
    key_plan,
    masked_block,
    memory_rows,
    valid_keys,
    visible,
    worth_loading,
)
from .rules.product import add_weighted_rows, rows_by_rows
from .rules.relative import relative_products, relative_query, vectors_of_tile
from .rules.score import dropped, first_state, kept, modified
from .rules.softmax import finish, in_parts, online_step
from .rules.tile import head, load_rows, load_tile, query_program, query_rows, store_tile

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn.options import Options

    Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]


@triton.jit
def _attend(
    acc, m, l, q, query, keys, values, m_first, n_first, valid, keep, h, H_q, row, score,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into the state of the rows; valid = keep = None for a full block."""
    BLOCK_M: tl.constexpr = q.shape[0]
    k = load_rows(keys, n_first, valid, BLOCK_N, BLOCK_D, D)
    s = rows_by_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    if score.keys_ptr is not None:
        vectors = vectors_of_tile(
            m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N, D, BLOCK_D
        )
        s += relative_products(query, vectors, BLOCK_N, PRECISION)
    rows = m_first + tl.arange(0, BLOCK_M)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    s, factor, _, _ = modified(s, rows[:, None], k_pos[None, :], h, row, score)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    MASKED: tl.constexpr = keep is not None or score.hides is not None
    p, rescale, m, l = online_step(s, m, l, factor, MASKED)
    if score.dropout is not None:
        p = dropped(p, kept(m_first, n_first, h, H_q, row, score, BLOCK_M, BLOCK_N), score)
    v = load_rows(values, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, m, l


@triton.jit(do_not_specialize=["H_q", "G", "T_q", "T_k"])
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, k_desc, v_desc,
    q_strides, k_strides, v_strides, o_strides, mask, score, H_q, G, T_q, T_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Full key blocks first, unmasked; then the boundary blocks. 1-D grid: see `query_program`."""
    tile, b, h_q, h_k = query_program(T_q, H_q, G, mask, BLOCK_M)
    row = batch_row(b, T_q, T_k, mask)
    batch, first_q, first_k = memory_rows(b, mask)
    m_first, m_last, rows, in_rows = query_rows(tile, row.T_q, BLOCK_M)
    q_ptr, q_stride = head(q_ptr, batch, h_q, first_q, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, batch, h_k, first_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, batch, h_k, first_k, v_strides, INDEX)
    keys = (k_ptr, k_stride, k_desc, batch, h_k, first_k)
    values = (v_ptr, v_stride, v_desc, batch, h_k, first_k)
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    query = relative_query(q, batch, h_q, first_q, m_first, in_rows, score, D, BLOCK_D, INDEX)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m, l = first_state(h_q, m, l, score)
    if PARTS > 1:
        l = in_parts(l, PARTS)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    full, boundary, place = key_plan(tile, m_first, m_last, h_q, row, mask, BLOCK_N)
    for i in range(0, full):
        acc, m, l = _attend(
            acc, m, l, q, query, keys, values, m_first,
            full_block(i, place, mask) * BLOCK_N, None, None, h_q, H_q, row, score,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, boundary):
        n_first = masked_block(i, place, mask) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, row, mask)
        if worth_loading(valid, mask):
            keep = valid[None, :] & visible(rows[:, None], k_pos[None, :], h_q, row, mask)
            acc, m, l = _attend(
                acc, m, l, q, query, keys, values, m_first, n_first, valid,
                keep, h_q, H_q, row, score, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip

    o, lse = finish(acc, m, l)
    o_ptr, o_stride = head(o_ptr, batch, h_q, first_q, o_strides, INDEX)
    store_tile(o_ptr, o_stride, m_first, o, in_rows, BLOCK_M, BLOCK_DV, D_V)
    stats = (batch * H_q + h_q).to(tl.int64) * T_q + first_q + rows
    tl.store(lse_ptr + stats, lse, mask=in_rows)


def _plan(options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Launch:
    BLOCK_D, BLOCK_DV = block_dim(q.shape[3]), block_dim(v.shape[3])
    tile = tile_for("forward", options, q, BLOCK_D, BLOCK_DV)
    programs = query_programs(options, q, tile.BLOCK_M)
    return Launch(
        attention_forward_kernel, programs, tile,
        strides(q), strides(k), strides(v), strides(o),
        mask_for_queries(options, q, k, tile) if programs else None,
        kernel_score(options, q.dtype), *sizes(q, k),
        q.shape[3], v.shape[3], tile.BLOCK_M, tile.BLOCK_N, BLOCK_D, BLOCK_DV,
        index_type(q, k, v, o, options.relative_query), dot_precision(q.dtype), tile.sum_parts,
        streams=((1, k, tile.BLOCK_N, BLOCK_D), (2, v, tile.BLOCK_N, BLOCK_DV)),
    )  # fmt: skip


def launch_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's dtype and memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v], last dims contiguous and
    whole multiples of 16 bytes, H_k | H_q. Packed sequences have B = 1.
    """
    q, k, v = aligned(q), aligned(k), aligned(v)
    B, H_q, T_q, _ = q.shape
    o = empty_in_layout(q, H_q, T_q, v.shape[3])
    lse = torch.empty(B, H_q, T_q, dtype=torch.float32, device=q.device)
    launch_for(_plan, options, (q, k, v), o)(q, k, v, o, lse)
    return o, lse


def prepare_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Forward | None:
    """`launch_forward` for tensors of the same shapes, strides, dtype and device and the same
    options, worked out; None where copies of these tensors have to be launched.

    It depends on `device_key` and `dot_precision` too, and takes the current device for theirs.
    """
    if any(aligned(x) is not x for x in (q, k, v)):
        return None
    like = empty_in_layout(q, q.shape[1], q.shape[2], v.shape[3])
    launch = launch_for(_plan, options, (q, k, v), like)
    shape, steps, dtype, device = like.shape, like.stride(), q.dtype, q.device
    rows = shape[:3]

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return launch_forward(q, k, v, options)
        o = torch.empty_strided(shape, steps, dtype=dtype, device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        launch(q, k, v, o, lse)
        return o, lse

    return forward
