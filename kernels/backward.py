"""Backward, deterministic: one program a tile of queries for dQ, one a tile of keys for dK and dV.

With p = softmax weights, do the gradient of o and dlse that of lse (Dao et al. 2022, appendix B.4):

    dv = p^T do          dp = do v^T          delta = rowsum(o * do) - dlse
    ds = p * (dp - delta)          dq = scale * ds k          dk = scale * ds^T q

p is computed again from lse. The G query heads of a K/V head are met in a loop by one program, so
dK and dV are summed in registers and never expanded; there are no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arguments import (
    MaskArguments,
    aligned,
    block_dim,
    blocks,
    dot_precision,
    empty_in_layout,
    index_type,
    mask_numbers,
    strides,
)
from .mask import (
    any_key,
    batch_row,
    boundary_block,
    key_blocks,
    query_blocks,
    valid_keys,
    visible,
    worth_loading,
)
from .padding import mask_pointers
from .product import add_weighted_rows, rows_by_rows
from .softmax import LOG2E, weights
from .tile import head, key_program, load_tile, load_vector, query_program, query_rows, store_tile


@triton.jit
def _grow_dq(
    dq, q, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, n_first, valid, keep, scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq += ds k for one key block; valid = keep = None for a full block."""
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    s = rows_by_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    p = weights(s, lse[:, None], scale_log2)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    dp = rows_by_rows(do, v, PRECISION)
    ds = p * (dp - delta[:, None])
    return add_weighted_rows(dq, ds, k, PRECISION)


@triton.jit(do_not_specialize=[
    "q_strides", "k_strides", "v_strides", "o_strides", "do_strides", "dq_strides",
    "padding_stride", "H_q", "G", "T_q", "T_k", "query_offset", "left", "right",
])  # fmt: skip
def attention_backward_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, delta_ptr,
    padding_ptr, extents_ptr, lengths_ptr, offsets_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, padding_stride,
    H_q, G, T_q, T_k, query_offset, left, right, scale, scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the delta of its rows, which dK/dV reads. Grid as forward."""
    tile, b, h_q, h_k = query_program(T_q, H_q, G, BLOCK_M)
    m_first, m_last, rows, in_rows = query_rows(tile, T_q, BLOCK_M)
    offset, start, end, solid = batch_row(
        b, T_k, query_offset, offsets_ptr, lengths_ptr, extents_ptr
    )
    q_ptr, q_stride = head(q_ptr, b, h_q, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, b, h_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, b, h_k, v_strides, INDEX)
    o_ptr, o_stride = head(o_ptr, b, h_q, o_strides, INDEX)
    do_ptr, do_stride = head(do_ptr, b, h_q, do_strides, INDEX)
    dq_ptr, dq_stride = head(dq_ptr, b, h_q, dq_strides, INDEX)

    stats = (b * H_q + h_q).to(tl.int64) * T_q + rows
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    o = load_tile(o_ptr, o_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= load_vector(dlse_ptr + stats, in_rows, 0.0)
    tl.store(delta_ptr + stats, delta, mask=in_rows)
    lse = load_vector(lse_ptr + stats, in_rows, float("inf"))

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = key_blocks(
        m_first + offset, m_last + offset, start, end, solid, left, right, BLOCK_N
    )
    for block in range(full_lo, full_hi):
        dq = _grow_dq(
            dq, q, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, block * BLOCK_N, None, None,
            scale_log2, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, (full_lo - lo) + (hi - full_hi)):
        n_first = boundary_block(i, lo, full_lo, full_hi) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, b, start, end, padding_ptr, padding_stride)
        if worth_loading(valid, padding_ptr):
            keep = valid[None, :] & visible((rows + offset)[:, None], k_pos[None, :], left, right)
            dq = _grow_dq(
                dq, q, do, lse, delta, k_ptr, k_stride, v_ptr, v_stride, n_first, valid, keep,
                scale_log2, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
    store_tile(dq_ptr, dq_stride, m_first, dq * scale, in_rows, BLOCK_M, BLOCK_D, D)


@triton.jit
def _grow_dkv(
    dk, dv, k, v, q_ptr, q_stride, do_ptr, do_stride, lse_ptr, delta_ptr, m_first, in_rows, keep,
    scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do for one query block, transposed: keys down, queries across."""
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)
    do = load_tile(do_ptr, do_stride, m_first, in_rows, BLOCK_M, BLOCK_DV, D_V)
    rows = m_first + tl.arange(0, BLOCK_M)
    # A row past the last has lse = inf, so its weights are 0 and need no mask.
    lse = load_vector(lse_ptr + rows, in_rows, float("inf"))
    delta = load_vector(delta_ptr + rows, in_rows, 0.0)
    s = rows_by_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
    p = weights(s, lse[None, :], scale_log2)
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    dv = add_weighted_rows(dv, p, do, PRECISION)
    dp = rows_by_rows(v, do, PRECISION)
    ds = p * (dp - delta[None, :])
    dk = add_weighted_rows(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=[
    "q_strides", "k_strides", "v_strides", "do_strides", "dk_strides", "dv_strides",
    "padding_stride", "H_q", "G", "T_q", "T_k", "query_offset", "left", "right",
])  # fmt: skip
def attention_backward_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    padding_ptr, extents_ptr, lengths_ptr, offsets_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, padding_stride,
    H_q, G, T_q, T_k, query_offset, left, right, scale, scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all G heads. 1-D grid: see `key_program`."""
    tile, b, h_k = key_program(T_k, H_q // G, BLOCK_N)
    n_first = tile * BLOCK_N
    offset, start, end, _ = batch_row(b, T_k, query_offset, offsets_ptr, lengths_ptr, extents_ptr)
    k_pos = n_first + tl.arange(0, BLOCK_N)
    in_keys = k_pos < T_k
    valid = valid_keys(k_pos, b, start, end, padding_ptr, padding_stride)
    k_ptr, k_stride = head(k_ptr, b, h_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, b, h_k, v_strides, INDEX)
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    lo, full_lo, full_hi, hi = query_blocks(
        tl.maximum(n_first, start), tl.minimum(n_first + BLOCK_N, end) - 1,
        offset, T_q, left, right, BLOCK_M,
    )  # fmt: skip
    heads = tl.where(any_key(valid), G, 0)
    for g in range(0, heads):
        h_q = h_k * G + g
        q_head, q_stride = head(q_ptr, b, h_q, q_strides, INDEX)
        do_head, do_stride = head(do_ptr, b, h_q, do_strides, INDEX)
        stats = (b * H_q + h_q).to(tl.int64) * T_q
        for block in range(full_lo, full_hi):
            dk, dv = _grow_dkv(
                dk, dv, k, v, q_head, q_stride, do_head, do_stride,
                lse_ptr + stats, delta_ptr + stats, block * BLOCK_M, None, None, scale_log2,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
        for i in range(0, (full_lo - lo) + (hi - full_hi)):
            m_first = boundary_block(i, lo, full_lo, full_hi) * BLOCK_M
            rows = m_first + tl.arange(0, BLOCK_M)
            keep = visible((rows + offset)[None, :], k_pos[:, None], left, right)
            dk, dv = _grow_dkv(
                dk, dv, k, v, q_head, q_stride, do_head, do_stride,
                lse_ptr + stats, delta_ptr + stats, m_first, rows < T_q, keep, scale_log2,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip

    # The weights of keys that no query may see were never masked: they end here.
    dk = tl.where(valid[:, None], dk * scale, 0.0)
    dv = tl.where(valid[:, None], dv, 0.0)
    dk_ptr, dk_stride = head(dk_ptr, b, h_k, dk_strides, INDEX)
    dv_ptr, dv_stride = head(dv_ptr, b, h_k, dv_strides, INDEX)
    store_tile(dk_ptr, dk_stride, n_first, dk, in_keys, BLOCK_N, BLOCK_D, D)
    store_tile(dv_ptr, dv_stride, n_first, dv, in_keys, BLOCK_N, BLOCK_DV, D_V)


def launch_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    mask: MaskArguments, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the shapes, dtypes and memory orders of q, k, v.

    do [B, H_q, T_q, D_v] with its last dim contiguous; dlse fp32 [B, H_q, T_q] contiguous or None;
    o and lse as `launch_forward` returned them for the same q, k, v, mask and scale.
    """
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    B, H_q, T_q, D = q.shape
    H_k, T_k, D_v = v.shape[1:]
    dq = empty_in_layout(q, H_q, T_q, D)
    dk = empty_in_layout(k, H_k, T_k, D)
    dv = empty_in_layout(v, H_k, T_k, D_v)
    delta = torch.empty_like(lse)
    BLOCK_D, BLOCK_DV = block_dim(D), block_dim(D_v)
    pointers = mask_pointers(mask)
    numbers = (*mask_numbers(mask, q, k), scale, scale * LOG2E.value)
    dims = (BLOCK_D, BLOCK_DV)
    promises = (
        index_type(q, k, v, o, do, dq, dk, dv),
        dot_precision(q.dtype),
    )

    tile = config.lookup("backward_dq", q.element_size(), max(dims))
    programs = blocks(T_q, tile.BLOCK_M) * B * H_q
    if programs:
        attention_backward_dq_kernel[(programs,)](
            q, k, v, o, do, lse, dlse, dq, delta, *pointers,
            *map(strides, (q, k, v, o, do, dq)), *numbers,
            D, D_v, tile.BLOCK_M, tile.BLOCK_N, *dims, *promises,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    tile = config.lookup("backward_dkv", q.element_size(), max(dims))
    programs = blocks(T_k, tile.BLOCK_N) * B * H_k
    if programs:
        attention_backward_dkv_kernel[(programs,)](
            q, k, v, do, lse, delta, dk, dv, *pointers,
            *map(strides, (q, k, v, do, dk, dv)), *numbers,
            D, D_v, tile.BLOCK_M, tile.BLOCK_N, *dims, *promises,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq, dk, dv
