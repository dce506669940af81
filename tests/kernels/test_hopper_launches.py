"""Host cost of the Hopper kernels: a known call makes nothing anew, and does little."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import fastattn
from fastattn import dispatch
from fastattn.bench.time import overhead
from fastattn.testing.compiling.compile_pool import CompilePool


def cases(backend: str) -> dict[str, Callable[[], Any]]:
    """Calls whose like was seen before, and a backward."""
    rows = [torch.randn(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in rows]
    dense = partial(fastattn.attention, causal=True, backend=backend)
    o = dense(*leaves)
    do = torch.ones_like(o)
    packed = [x[0].transpose(0, 1).contiguous() for x in rows]
    starts = torch.tensor([0, 100, 200], dtype=torch.int32)
    return {
        "dense": partial(dense, *rows),
        "backward": partial(torch.autograd.grad, o, leaves, do, retain_graph=True),
        "packed": partial(fastattn.attention_varlen, *packed, starts, causal=True, backend=backend),
    }


def work_of_known_calls(backend: str) -> dict[str, tuple[int, int, int]]:
    """Count, for each case when it is repeated: launches that Triton looks through, descriptors
    that are checked, and Python functions that are entered."""
    run, check = triton.JITFunction.run, TensorDescriptor.__post_init__
    looked = checked = entered = 0

    def counting_run(*args: Any, **kwargs: Any) -> Any:
        nonlocal looked
        looked += 1
        return run(*args, **kwargs)

    def counting_check(self: Any) -> None:
        nonlocal checked
        checked += 1
        check(self)

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event == "call"

    results = {}
    with (
        overhead.stand_in_gpu(),
        mock.patch.object(triton.JITFunction, "run", counting_run),
        mock.patch.object(TensorDescriptor, "__post_init__", counting_check),
        mock.patch.object(dispatch, "on_hopper", lambda device: True),
    ):
        for name, call in cases(backend).items():
            for _ in range(2):
                call()
            looked = checked = entered = 0
            sys.setprofile(count)
            try:
                call()
            finally:
                sys.setprofile(None)
            results[name] = (looked, checked, entered)
    return results


def both() -> list[dict[str, tuple[int, int, int]]]:
    return [work_of_known_calls("hopper"), work_of_known_calls("triton")]


def test_known_calls_cost_the_host_little_more_than_portable_ones(
    compile_pool: CompilePool,
) -> None:
    hopper, portable = compile_pool.call(f"{__file__}:both", "sm_90")
    for name, (looked, checked, entered) in hopper.items():
        assert (looked, checked) == (0, 0), name
        most = portable[name][2]
        assert entered <= 1.5 * most, f"{name}: {entered} functions, {most} of the portable kernels"
