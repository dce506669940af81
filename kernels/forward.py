"""Forward: o = softmax(q k^T * scale + mask) v and lse, one program a tile of queries."""

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
    batch_row,
    boundary_block,
    key_blocks,
    valid_keys,
    visible,
    worth_loading,
)
from .padding import mask_pointers
from .product import add_weighted_rows, rows_by_rows
from .softmax import LOG2E, finish, online_step
from .tile import head, load_tile, query_program, query_rows, store_tile


@triton.jit
def _attend(
    acc, m, l, q, k_ptr, k_stride, v_ptr, v_stride, n_first, valid, keep, scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into the state of the rows; valid = keep = None for a full block."""
    k = load_tile(k_ptr, k_stride, n_first, valid, BLOCK_N, BLOCK_D, D)
    s = rows_by_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    p, rescale, m, l = online_step(s, m, l, scale_log2, keep is not None)
    v = load_tile(v_ptr, v_stride, n_first, valid, BLOCK_N, BLOCK_DV, D_V)
    acc = add_weighted_rows(acc * rescale[:, None], p, v, PRECISION)  # [BLOCK_M, BLOCK_DV]
    return acc, m, l


@triton.jit(do_not_specialize=[
    "q_strides", "k_strides", "v_strides", "o_strides", "padding_stride",
    "H_q", "G", "T_q", "T_k", "query_offset", "left", "right",
])  # fmt: skip
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    padding_ptr, extents_ptr, lengths_ptr, offsets_ptr,
    q_strides, k_strides, v_strides, o_strides, padding_stride,
    H_q, G, T_q, T_k, query_offset, left, right, scale_log2,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Full key blocks first, unmasked; then the boundary blocks. 1-D grid: see `query_program`."""
    tile, b, h_q, h_k = query_program(T_q, H_q, G, BLOCK_M)
    m_first, m_last, rows, in_rows = query_rows(tile, T_q, BLOCK_M)
    offset, start, end, solid = batch_row(
        b, T_k, query_offset, offsets_ptr, lengths_ptr, extents_ptr
    )
    q_ptr, q_stride = head(q_ptr, b, h_q, q_strides, INDEX)
    k_ptr, k_stride = head(k_ptr, b, h_k, k_strides, INDEX)
    v_ptr, v_stride = head(v_ptr, b, h_k, v_strides, INDEX)
    q = load_tile(q_ptr, q_stride, m_first, in_rows, BLOCK_M, BLOCK_D, D)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    lo, full_lo, full_hi, hi = key_blocks(
        m_first + offset, m_last + offset, start, end, solid, left, right, BLOCK_N
    )
    for block in range(full_lo, full_hi):
        acc, m, l = _attend(
            acc, m, l, q, k_ptr, k_stride, v_ptr, v_stride, block * BLOCK_N, None, None, scale_log2,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    for i in range(0, (full_lo - lo) + (hi - full_hi)):
        n_first = boundary_block(i, lo, full_lo, full_hi) * BLOCK_N
        k_pos = n_first + tl.arange(0, BLOCK_N)
        valid = valid_keys(k_pos, b, start, end, padding_ptr, padding_stride)
        if worth_loading(valid, padding_ptr):
            keep = valid[None, :] & visible((rows + offset)[:, None], k_pos[None, :], left, right)
            acc, m, l = _attend(
                acc, m, l, q, k_ptr, k_stride, v_ptr, v_stride, n_first, valid, keep, scale_log2,
                D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip

    o, lse = finish(acc, m, l)
    o_ptr, o_stride = head(o_ptr, b, h_q, o_strides, INDEX)
    store_tile(o_ptr, o_stride, m_first, o, in_rows, BLOCK_M, BLOCK_DV, D_V)
    tl.store(lse_ptr + (b * H_q + h_q).to(tl.int64) * T_q + rows, lse, mask=in_rows)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, scale: float
) -> tuple[Tensor, Tensor]:
    """o [B, H_q, T_q, D_v] in q's dtype and memory order, lse fp32 [B, H_q, T_q] (natural log).

    q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v], last dims contiguous and
    whole multiples of 16 bytes, H_k | H_q.
    """
    q, k, v = aligned(q), aligned(k), aligned(v)
    B, H_q, T_q, D = q.shape
    D_v = v.shape[3]
    o = empty_in_layout(q, H_q, T_q, D_v)
    lse = torch.empty(B, H_q, T_q, dtype=torch.float32, device=q.device)
    BLOCK_D, BLOCK_DV = block_dim(D), block_dim(D_v)
    tile = config.lookup("forward", q.element_size(), max(BLOCK_D, BLOCK_DV))
    programs = blocks(T_q, tile.BLOCK_M) * B * H_q
    if programs == 0:
        return o, lse
    attention_forward_kernel[(programs,)](
        q, k, v, o, lse, *mask_pointers(mask),
        strides(q), strides(k), strides(v), strides(o), *mask_numbers(mask, q, k),
        scale * LOG2E.value,
        D, D_v, tile.BLOCK_M, tile.BLOCK_N, BLOCK_D, BLOCK_DV,
        index_type(q, k, v, o), dot_precision(q.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, lse
