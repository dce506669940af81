"""Inspect what calls compile to, users' functions in them included, on a machine without a GPU."""

from collections.abc import Callable
from unittest import mock

from ... import dispatch
from ...functional import call_memo
from ...kernels.launch import launches
from .cross_compile import CompiledFacts, compiling_for, describe


def compiled(call: Callable[[], object], target: str = "sm_90") -> list[CompiledFacts]:
    """Compile the kernels that a call launches, for a GPU that may be absent; nothing is computed.

    Args:
        call: calls functions of fastattn on CPU tensors, by the "triton" backend or by "auto".
            What they return is uninitialised memory.
        target: one of `cross_compile.TARGETS`.

    Returns:
        Registers and spilled bytes of a thread, bytes of shared memory, matrix instructions and
        more of each kernel, in the order of the launches.

    Raises:
        ValueError: `target` is not one of TARGETS.
        RuntimeError: this process interprets its kernels (TRITON_INTERPRET=1).
        triton.TritonError: a function of the call does not compile.
    """
    try:
        with (
            compiling_for(target) as launched,
            mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None),
        ):
            call_memo.forget()
            call()
    finally:
        # Launches that were kept are of a GPU that is gone.
        launches.forget()
        call_memo.forget()
    return [describe(kernel) for kernel in launched]
