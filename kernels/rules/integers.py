"""Integers inside tuple arguments of kernels, passed at run time so that no value specialises.

Triton compiles a kernel anew when an integer in a tuple becomes 1 or a multiple of 16, and
`do_not_specialize` does not reach into tuples. 4 x + 3 is never either, so lengths, strides and
window sides are passed in that form and no new value compiles anything.
"""

import triton


def runtime_int(x: int | None) -> int | None:
    """4 x + 3; None, which leaves its part of the kernel out, stays None."""
    return None if x is None else 4 * x + 3


@triton.jit
def value(n):
    """The integer that the host passed as `runtime_int`."""
    return n >> 2
