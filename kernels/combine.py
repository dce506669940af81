"""The outputs of splits of the keys, merged into those of all keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch.arguments import block_dim
from .launch.launches import Launch
from .rules.integers import runtime_int, value
from .rules.softmax import finish, merge_states

# Parts that are loaded at a time.
_BLOCK_S = 16


@triton.jit(do_not_specialize=["splits", "rows", "H", "T"])
def combine_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, row_width, splits, rows, H, T,
    D_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row [b, h, t], in the order of their numbers."""
    n = tl.program_id(0)
    cols = tl.arange(0, BLOCK_DV)
    parts_ptr += n.to(tl.int64) * value(row_width)
    step = tl.cast(rows, tl.int64) * value(row_width)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for first in range(0, splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        pointer = part_lse_ptr + part.to(tl.int64) * rows + n
        lse = tl.load(pointer, mask=part < splits, other=float("-inf"))
        # A part that saw nothing has no output.
        within = (lse > float("-inf"))[:, None] & (cols < D_V)[None, :]
        pointers = parts_ptr + (part * step)[:, None] + cols[None, :]
        acc, m, l = merge_states(acc, m, l, tl.load(pointers, mask=within, other=0.0), lse)
    o, lse = finish(acc, m, l)
    b = (n // (H * T)).to(tl.int64)
    h = (n // T % H).to(tl.int64)
    t = (n % T).to(tl.int64)
    o_ptr += b * value(o_strides[0]) + h * value(o_strides[1]) + t * value(o_strides[2])
    tl.store(o_ptr + cols[None, :], o.to(o_ptr.dtype.element_ty), mask=(cols < D_V)[None, :])
    tl.store(lse_ptr + n + tl.arange(0, 1), lse)


def combine_launch(parts: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, D_v: int) -> Launch:
    """The launch that writes o [B, H, T, D_v or wider] and lse fp32 [B, H, T] from all parts.

    parts fp32 [splits * B, H, T, width] and part_lse fp32 [splits * B, H, T], contiguous: split s
    of batch row b is row s B + b. parts are not read where part_lse is -inf.
    """
    B, H, T = lse.shape
    rows = B * H * T
    stride_b, stride_h, stride_t, _ = map(runtime_int, o.stride())
    return Launch(
        combine_kernel,
        rows,
        {"num_warps": 4},
        (stride_b, stride_h, stride_t),
        runtime_int(parts.stride(2)),
        part_lse.shape[0] // B,
        rows,
        H,
        T,
        D_v,
        block_dim(D_v),
        _BLOCK_S,
    )


@triton.jit
def merge_kernel(
    o1_ptr, lse1_ptr, o2_ptr, lse2_ptr, o_ptr, lse_ptr, width: tl.constexpr, COLS: tl.constexpr
):
    """Merge the two parts of one row."""
    n = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    cols = tl.arange(0, COLS)[None, :]
    index = n[:, None] * width + cols
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, COLS], tl.float32)
    for part in tl.static_range(2):
        lse = tl.load((lse1_ptr if part == 0 else lse2_ptr) + n)
        # A part that saw nothing has no output.
        within = (lse > float("-inf"))[:, None] & (cols < width)
        o = tl.load((o1_ptr if part == 0 else o2_ptr) + index, mask=within, other=0.0)
        acc, m, l = merge_states(acc, m, l, o.to(tl.float32), lse)
    o, lse = finish(acc, m, l)
    tl.store(o_ptr + index, o.to(o_ptr.dtype.element_ty), mask=cols < width)
    tl.store(lse_ptr + n, lse)


def launch_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """o [..., D_v], contiguous, in the dtype of o1, and lse fp32 [...], from those of two parts."""
    o1, lse1, o2, lse2 = (x.contiguous() for x in (o1, lse1, o2, lse2))
    o, lse = torch.empty_like(o1), torch.empty_like(lse1)
    if lse.numel():
        width = o.shape[-1]
        merge_kernel[(lse.numel(),)](
            o1, lse1, o2, lse2, o, lse, width, block_dim(width), num_warps=1
        )
    return o, lse
