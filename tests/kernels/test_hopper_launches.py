"""Host cost of the Hopper kernels: a known call makes nothing anew, and does little."""

import sys
from collections import Counter
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
    packed = [x[0].transpose(0, 1).contiguous() for x in rows]
    starts = torch.tensor([0, 100, 200], dtype=torch.int32)
    return {
        "dense": partial(dense, *rows),
        "backward": partial(torch.autograd.grad, o, leaves, torch.ones_like(o), retain_graph=True),
        "packed": partial(fastattn.attention_varlen, *packed, starts, causal=True, backend=backend),
    }


def work_of_known_calls() -> list[dict[str, Counter[str]]]:
    """Count, for each case when it is repeated, by the kernels for Hopper and by the others:
    launches that Triton looks through, descriptors that are checked, and Python functions.
    """
    of_triton = {triton.JITFunction.run.__code__: "launches"}
    of_triton[TensorDescriptor.__post_init__.__code__] = "descriptors"
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            counts.update(("functions", of_triton.get(frame.f_code, "others")))

    results: list[dict[str, Counter[str]]] = []
    with overhead.stand_in_gpu(), mock.patch.object(dispatch, "on_hopper", lambda device: True):
        for backend in ("hopper", "triton"):
            results.append({})
            for name, call in cases(backend).items():
                for _ in range(2):
                    call()
                counts.clear()
                sys.setprofile(count)
                try:
                    call()
                finally:
                    sys.setprofile(None)
                results[-1][name] = counts.copy()
    return results


def test_known_calls_cost_the_host_little_more_than_portable_ones(
    compile_pool: CompilePool,
) -> None:
    hopper, portable = compile_pool.call(f"{__file__}:work_of_known_calls", "sm_90")
    for name, work in hopper.items():
        assert (work["launches"], work["descriptors"]) == (0, 0), name
        most = 1.5 * portable[name]["functions"]
        assert 0 < work["functions"] <= most, f"{name}: {work}, at most {most} functions"
