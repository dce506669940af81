"""Make Triton's CPU interpreter (TRITON_INTERPRET=1) compute as a GPU.

The stock interpreter multiplies bit patterns of bfloat16, truncates instead of rounding, propagates
NaN in tl.maximum, and silently reads past the end of a tensor. `patch_interpreter` fixes this in
the whole process, by `emulation`, and makes the interpreter faster (`interpreter_speed`).
"""

import triton


def patch_interpreter() -> None:
    """Patch the interpreter of this process; without TRITON_INTERPRET=1 do nothing.

    Idempotent; call it before the first launch.
    """
    if not triton.knobs.runtime.interpret:
        return
    # Only the interpreter needs NumPy.
    from . import emulation, interpreter_speed

    emulation.install()
    interpreter_speed.install()
