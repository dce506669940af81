"""Integers as kernels take and compare them.

Those inside tuple arguments are passed at run time so that no value specialises. Triton compiles a
kernel anew when an integer in a tuple becomes 1 or a multiple of 16, and `do_not_specialize` does
not reach into tuples. 4 x + 3 is never either, so lengths, strides and window sides are passed in
that form and no new value compiles anything.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


def runtime_int(x: int | None) -> int | None:
    """4 x + 3; None, which leaves its part of the kernel out, stays None."""
    return None if x is None else 4 * x + 3


@triton.jit
def value(n):
    """The integer that the host passed as `runtime_int`."""
    return n >> 2


@triton.jit
def at_most(x, limit, also=None):
    """x <= limit, element by element, of int32; and `also`, of bool, where it is given.

    LLVM would make vectors of a tile's comparisons, pack what comes out into words, and take each
    bit from its word again. With `also` a comparison is one instruction still.
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
