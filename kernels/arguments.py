"""What every launcher tells its kernel: strides, alignment, precision, and the mask in numbers."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

# Window sides are added to positions in int32; no sequence is this long.
UNBOUNDED = 1 << 30
# No tile has more rows than this.
_MAX_ROWS = 256


class MaskArguments(NamedTuple):
    """The mask of one call, as checked by the caller.

    left, right: sides of the band around each query's position, None = unbounded (causal: right 0).
    query_offset: position of query 0 among the keys; query_offsets: int [B], one per batch row.
    key_padding_mask: bool [B, T_k], True = attend. key_lengths: int [B].
    """

    left: int | None
    right: int | None
    query_offset: int
    query_offsets: Tensor | None
    key_padding_mask: Tensor | None
    key_lengths: Tensor | None


def strides(x: Tensor) -> tuple[int, int, int]:
    """Batch, head and row stride of [B, H, T, D]."""
    stride_b, stride_h, stride_t, _ = x.stride()
    return stride_b, stride_h, stride_t


def aligned(x: Tensor) -> Tensor:
    """x if each of its rows starts at a multiple of 16 bytes, as vector loads need, else a copy.

    The caller keeps head dims to whole multiples, so a copy is rare: a view that starts or steps
    between them.
    """
    elements = 16 // x.element_size()
    assert x.shape[3] % elements == 0, "the caller pads the head dim"
    if x.data_ptr() % 16 == 0:
        stride_b, stride_h, stride_t, _ = x.stride()
        if (stride_b | stride_h | stride_t) % elements == 0:
            return x
        steps = zip(x.shape[:3], x.stride()[:3], strict=True)
        if all(size <= 1 or stride % elements == 0 for size, stride in steps):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def index_type(*tensors: Tensor) -> tl.dtype:
    """int32 where no tile spans 2^31 elements, else int64, for offsets inside a tile."""
    for x in tensors:
        if abs(x.stride(2)) >= 2**31 // _MAX_ROWS:
            return tl.int64
    return tl.int32


def block_dim(D: int) -> int:
    """Columns of a tile for head dim D: a power of two, at least the 16 that tl.dot needs."""
    return max(16, 1 << (D - 1).bit_length())


def blocks(length: int, BLOCK: int) -> int:
    """How many blocks cover a length. `triton.cdiv` is for kernels and slow on the host."""
    return -(-length // BLOCK)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are IEEE unless torch's own matmul may use TF32; others have no choice."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def empty_in_layout(like: Tensor, heads: int, rows: int, cols: int) -> Tensor:
    """Empty [B, heads, rows, cols] in the memory order of `like`: a [B, T, H, D] user keeps it."""
    B = like.shape[0]
    if like.stride(1) < like.stride(2):
        return like.new_empty(B, rows, heads, cols).transpose(1, 2)
    return like.new_empty(B, heads, rows, cols)


def mask_numbers(mask: MaskArguments, q: Tensor, k: Tensor) -> tuple[int | None, ...]:
    """padding_stride, H_q, G, T_q, T_k, query_offset, left and right, in the kernels' order."""
    padding = mask.key_padding_mask
    _, H_q, T_q, _ = q.shape
    _, H_k, T_k, _ = k.shape
    return (
        0 if padding is None else padding.stride(0),
        H_q,
        H_q // H_k,
        T_q,
        T_k,
        mask.query_offset,
        None if mask.left is None else min(mask.left, UNBOUNDED),
        None if mask.right is None else min(mask.right, UNBOUNDED),
    )
