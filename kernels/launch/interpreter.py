"""Makes Triton's CPU interpreter (TRITON_INTERPRET=1) give the numbers a GPU gives.

The stock interpreter multiplies bfloat16 by its bit pattern, truncates where a GPU rounds, lets NaN
through tl.maximum where a GPU drops it, and reads past the end of a tensor without a word.
`mend` repairs that for the whole process; `emulation` holds the repairs, `interpreter_speed` what
makes it fast enough to test with.
"""

import triton


def mend() -> None:
    """Repair the interpreter of this process; without TRITON_INTERPRET=1 do nothing.

    May be called any number of times, at any moment before the first launch that has to be right.
    """
    if not triton.knobs.runtime.interpret:
        return
    # The interpreter needs NumPy, which compiled kernels do without.
    from . import emulation, interpreter_speed

    emulation.install()
    interpreter_speed.install()
