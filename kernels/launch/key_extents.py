"""Key padding masks for kernels: three numbers per row, to skip by range, and bits, in words of 32
keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rules.mask import EXTENTS
from .launches import Launch

_BLOCK = 1024
# Rows of words hold whole blocks of keys up to this size.
_LARGEST = 128


@triton.jit(do_not_specialize=["T_k", "stride", "words"])
def padding_extents_kernel(padding_ptr, extents_ptr, T_k, stride, words, BLOCK: tl.constexpr):
    """extents[b] = first visible key, one past the last, number of hidden keys in between, and
    `words` words of 32 keys each, with a bit per visible key. Without any: 0, 0, 0.
    """
    b = tl.program_id(0)
    row_ptr = padding_ptr + b.to(tl.int64) * stride
    extents_ptr += b.to(tl.int64) * (EXTENTS + words)
    first = T_k
    end = 0
    count = 0
    for start in range(0, T_k, BLOCK):
        k_pos = start + tl.arange(0, BLOCK)
        keep = tl.load(row_ptr + k_pos, mask=k_pos < T_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(keep, k_pos, T_k)))
        end = tl.maximum(end, tl.max(tl.where(keep, k_pos + 1, 0)))
        count += tl.sum(keep.to(tl.int32))
        bits = keep.to(tl.int32).reshape(BLOCK // 32, 32) << tl.arange(0, 32)[None, :]
        word = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(extents_ptr + EXTENTS + word, tl.sum(bits, 1), mask=word < words)
    # Some kernels read the words of a first block without keys.
    tl.store(extents_ptr, tl.minimum(first, end))
    tl.store(extents_ptr + 1, end)
    tl.store(extents_ptr + 2, tl.maximum(end - first, 0) - count)


def extents_launch(key_padding_mask: Tensor) -> tuple[Tensor, Launch]:
    """Empty extents, int32 [B, 3 + words], and the launch that fills them, called on ((),
    key_padding_mask, extents).
    """
    B, T_k = key_padding_mask.shape
    words = triton.cdiv(T_k, _LARGEST) * (_LARGEST // 32)
    extents = key_padding_mask.new_empty(B, EXTENTS.value + words, dtype=torch.int32)
    stride = key_padding_mask.stride(0)
    return extents, Launch(padding_extents_kernel, B, {"num_warps": 4}, T_k, stride, words, _BLOCK)


def launch_padding_extents(key_padding_mask: Tensor) -> Tensor:
    """int32 [B, 3 + words] from a mask bool [B, T_k] with contiguous rows."""
    extents, launch = extents_launch(key_padding_mask)
    launch((), key_padding_mask, extents)
    return extents
