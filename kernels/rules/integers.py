"""Run-time integers in kernel arguments that are tuples.

Triton compiles a kernel anew when an integer in a tuple becomes 1 or a multiple of 16, and
`do_not_specialize` does not reach into tuples. 4 x + 3 is never either, so lengths, strides and
window sides travel in that form and no new value compiles anything.
"""

import triton


def number(x: int | None) -> int | None:
    """x as it travels; None, which leaves its part of the kernel out, stays None."""
    return None if x is None else 4 * x + 3


@triton.jit
def value(n):
    """The integer that travelled as n."""
    return n >> 2
