"""Host cost of a call (checks, dispatch, launch), of the first call, and of the import.

Without a GPU, a stand-in for Triton's driver takes the launches: kernels are compiled for its
target, and everything up to the driver is real.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import dispatch
from ..functional import attend, call_memo
from ..kernels import forward
from ..kernels.launch import launches, tiles
from ..testing.compiling.cross_compile import compiling_for
from .measure import Function

# Small, so that the GPU keeps up with the host and no launch waits for a full queue.
_SHAPE = (1, 2, 64, 64)
_STAND_IN_TILE = tiles.TileConfig(64, 64, num_warps=4, num_stages=2)


def host_cost(
    function: Function,
    *,
    synchronize: Callable[[], object] = lambda: None,
    calls: int = 100,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Microseconds of host time of a call: the median over runs of a mean over calls."""
    for _ in range(10):
        function()
    means = []
    for _ in range(repeats):
        synchronize()
        begin = clock()
        for _ in range(calls):
            function()
        means.append(1e6 * (clock() - begin) / calls)
    synchronize()
    return statistics.median(means)


def calls(device: str) -> dict[str, Function]:
    """Attention calls on tensors so small that they cost host time only.

    Args:
        device: "cuda", or "cpu" inside `stand_in_gpu`.

    Returns:
        "bare launch": Triton's launch of the forward kernel with prepared arguments. "fastattn":
        `attention` without gradients. "fastattn with grad": with a graph recorded. On a GPU also
        "sdpa" and "sdpa with grad", torch's own function, to be called with flash pinned.
    """
    q, k, v = (torch.randn(_SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ours = partial(attend.attention, causal=True, backend="triton")
    found: dict[str, Function] = {
        "bare launch": bare_launch(lambda: ours(q, k, v)),
        "fastattn": lambda: ours(q, k, v),
        "fastattn with grad": lambda: ours(*leaves),
    }
    if device == "cuda":
        sdpa: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, is_causal=True)
        found["sdpa"] = lambda: sdpa(q, k, v)
        found["sdpa with grad"] = lambda: sdpa(*leaves)
    return found


def call_costs(device: str, **options: Any) -> dict[str, float]:
    """Host microseconds of each of `calls`; options are those of `host_cost`."""
    pin: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device == "cuda":
        options.setdefault("synchronize", torch.cuda.synchronize)
        pin = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with pin:
        return {name: host_cost(call, **options) for name, call in calls(device).items()}


def over_bare_launch(device: str, rounds: int = 20) -> dict[str, float]:
    """Host time of each of `calls` as a multiple of the bare launch's."""
    least = least_costs(calls(device), rounds)
    return {name: cost / least["bare launch"] for name, cost in least.items()}


def least_costs(found: dict[str, Function], rounds: int = 20) -> dict[str, float]:
    """Microseconds of host time of each function: the least of runs in alternation.

    Other load on the machine only adds time.
    """
    least: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in found.items():
            cost = host_cost(call, calls=40, repeats=1)
            least[name] = min(cost, least.get(name, cost))
    return least


def bare_launch(call: Function) -> Function:
    """The last kernel launch of `call`, alone: the same kernel with the same arguments."""
    kernel = forward.attention_forward_kernel
    launched: list[Function] = []
    run = kernel.run

    def remember(*args: Any, **kwargs: Any) -> Any:
        launched.append(partial(run, *args, **kwargs))
        return run(*args, **kwargs)

    # A memoised launch would bypass `run`.
    launches.forget()
    call_memo.forget()
    with mock.patch.object(kernel, "run", remember):
        call()
    return launched[-1]


@contextmanager
def stand_in_gpu(target: str = "sm_90") -> Iterator[None]:
    """Kernels launch on CPU tensors, compiled for a target GPU; nothing is computed.

    Raises:
        RuntimeError: Triton interprets its kernels in this process.
    """
    with (
        compiling_for(target),
        tiles.forced(**dict.fromkeys(tiles.KERNELS, _STAND_IN_TILE)),
        mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None),
    ):
        try:
            yield
        finally:
            call_memo.forget()


_IMPORT = """
import json, sys, time
import torch
try:
    import triton
except ImportError:
    pass
begin = time.perf_counter()
import fastattn
json.dump(1e3 * (time.perf_counter() - begin), sys.stdout)
"""

_FIRST_CALL = """
import json, sys
from fastattn.bench.overhead import first_call
json.dump(first_call(sys.argv[1]), sys.stdout)
"""


def import_ms(repeats: int = 3) -> float:
    """Milliseconds that `import fastattn` adds to importing torch and triton: the median."""
    return statistics.median(float(_python(_IMPORT)) for _ in range(repeats))


# Triton resolves neither names of this module nor annotations, so the kernel uses none.
@triton.jit
def _nothing_kernel(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, 0.0)


def first_call(device: str) -> float:
    """Milliseconds of this process's first attention call, kernels being compiled or loaded.

    An empty kernel is launched first: Triton's once-a-process work, a hash over its whole
    installation, is not counted.
    """
    q = torch.randn(_SHAPE, device=device, dtype=torch.bfloat16)
    gpu: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    synchronize: Callable[[], object] = torch.cuda.synchronize
    if device != "cuda":
        gpu, synchronize = stand_in_gpu(), lambda: None
    with torch.no_grad(), gpu:
        _nothing_kernel[(1,)](torch.empty(1, device=device))
        synchronize()
        begin = time.perf_counter()
        attend.attention(q, q, q, causal=True, backend="triton")
        synchronize()
    return 1e3 * (time.perf_counter() - begin)


def first_call_ms(device: str) -> dict[str, float]:
    """Milliseconds of the first call: with an empty Triton cache, and with the one it left."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TRITON_CACHE_DIR": folder}
        return {
            name: float(_python(_FIRST_CALL, device, environment=environment))
            for name in ("empty cache", "warm cache")
        }


def _python(code: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    """The JSON that code prints in a fresh interpreter, without TRITON_INTERPRET."""
    variables = {**os.environ, **(environment or {})}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables,
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=40,  # below the stall limit of the process that waits
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a measuring process failed: {done.stderr.strip()}")
    return json.loads(done.stdout)
