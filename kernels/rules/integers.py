"""Integers as kernels take and compare them.

Integers inside tuple arguments must not specialise. Triton recompiles a kernel when an integer in a
tuple becomes 1 or a multiple of 16, and `do_not_specialize` does not apply to tuples. 4 x + 3 is
neither, so lengths, strides and window sides are passed in that form.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


def runtime_int(x: int | None) -> int | None:
    """4 x + 3, or None, which removes the part from the kernel."""
    return None if x is None else 4 * x + 3


@triton.jit
def value(n):
    """Inverse of `runtime_int`, on the device."""
    return n >> 2


@triton.jit
def at_most(x, limit, also=None):
    """x <= limit, element by element, for int32, ANDed with bool `also` if given.

    LLVM would vectorise comparisons, pack the results into words, and extract each bit again. With
    `also` a comparison is still one instruction.
    """
    if x.dtype != tl.int32 or limit.dtype != tl.int32 or not cuda_capability_geq(8):
        within = x <= limit
        if also is not None:
            within = within & also
    elif also is None:
        within = tl.inline_asm_elementwise(
            "setp.le.s32 $0, $1, $2;", "=b,r,r", [x, limit], tl.int1, True, 1
        )
    else:
        within = tl.inline_asm_elementwise(
            "setp.le.and.s32 $0, $1, $2, $3;", "=b,r,r,b", [x, limit, also], tl.int1, True, 1
        )
    return within


@triton.jit
def int32_within(x, low, high):
    """x, which may be int64, taken within [low, high], as int32."""
    return tl.minimum(tl.maximum(x, low), high).to(tl.int32)
