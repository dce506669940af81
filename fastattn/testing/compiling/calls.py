"""Inspect the compiled kernels of calls, including users' functions, without a GPU."""

from collections.abc import Callable
from unittest import mock

from ... import dispatch
from ...functional import call_memo
from ...kernels.launch import launches
from .cross_compile import CompiledFacts, compiling_for, describe


def compiled(call: Callable[[], object], target: str = "sm_90") -> list[CompiledFacts]:
    """Compile the kernels that a call launches, for an absent GPU; nothing is computed.

    Args:
        call: calls functions of fastattn on CPU tensors, with the backend "triton" or "auto".
            Results are uninitialised memory.
        target: one of `cross_compile.TARGETS`.

    Returns:
        Registers and spilled bytes per thread, bytes of shared memory, matrix instructions and more
        of each kernel, in launch order.

    Raises:
        ValueError: `target` is not one of TARGETS.
        RuntimeError: this process interprets its kernels (TRITON_INTERPRET=1).
        triton.TritonError: a user's function does not compile.
    """
    try:
        with (
            compiling_for(target) as launched,
            mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None),
        ):
            call_memo.forget()
            call()
    finally:
        # Cached launches belong to the former target.
        launches.forget()
        call_memo.forget()
    return [describe(kernel) for kernel in launched]
