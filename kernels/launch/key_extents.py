"""A boolean key padding mask in three numbers a row, so that kernels can skip by range."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import Launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["T_k", "stride"])
def padding_extents_kernel(padding_ptr, extents_ptr, T_k, stride, BLOCK: tl.constexpr):
    """extents[b] = first visible key, one past the last, number of hidden keys in between."""
    b = tl.program_id(0)
    row_ptr = padding_ptr + b.to(tl.int64) * stride
    first = T_k
    end = 0
    count = 0
    for start in range(0, T_k, BLOCK):
        k_pos = start + tl.arange(0, BLOCK)
        keep = tl.load(row_ptr + k_pos, mask=k_pos < T_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(keep, k_pos, T_k)))
        end = tl.maximum(end, tl.max(tl.where(keep, k_pos + 1, 0)))
        count += tl.sum(keep.to(tl.int32))
    tl.store(extents_ptr + 3 * b, first)
    tl.store(extents_ptr + 3 * b + 1, end)
    tl.store(extents_ptr + 3 * b + 2, tl.maximum(end - first, 0) - count)


def extents_launch(key_padding_mask: Tensor) -> tuple[Tensor, Launch]:
    """Empty extents, int32 [B, 3], and what fills them: launch((), key_padding_mask, extents)."""
    B, T_k = key_padding_mask.shape
    extents = torch.empty(B, 3, dtype=torch.int32, device=key_padding_mask.device)
    stride = key_padding_mask.stride(0)
    return extents, Launch(padding_extents_kernel, B, {"num_warps": 4}, T_k, stride, _BLOCK)


def launch_padding_extents(key_padding_mask: Tensor) -> Tensor:
    """int32 [B, 3] from a mask bool [B, T_k] with contiguous rows."""
    extents, launch = extents_launch(key_padding_mask)
    launch((), key_padding_mask, extents)
    return extents
