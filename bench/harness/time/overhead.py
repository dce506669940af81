"""Host cost of a call (checks, dispatch, launch), and of the import.

Without a GPU, a stand-in replaces Triton's driver: kernels are compiled for its target, and all
code up to the driver is real.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ... import dispatch
from ...cache.views import view_of_tensors
from ...functional import call_memo, decode, fused_attention
from ...kernels.launch import launches, tiles
from ...testing.compiling.cross_compile import compiling_for
from .samples import Function

# Small, so that the GPU keeps up with the host and its queue is never full.
_SHAPE = (1, 2, 64, 64)
_CALLS = 40  # averaged in a run


def host_costs(functions: Mapping[str, Function], rounds: int = 20) -> dict[str, float]:
    """Host microseconds of a call of each function: the least mean of alternating runs.

    Other load only adds time.
    """
    least = dict.fromkeys(functions, math.inf)
    for _ in range(rounds):
        for name, call in functions.items():
            for _ in range(10):
                call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                call()
            us = 1e6 * (time.perf_counter() - begin) / _CALLS
            least[name] = min(us, least[name])
    return least


def calls(device: str, row: str = "plain") -> dict[str, Function]:
    """Calls on tensors so small that only host time counts, on a GPU or inside `stand_in_gpu`.

    "bare launch" is Triton's launch of the call's kernels with prepared arguments; "fastattn" the
    call without gradients, "fastattn with grad" with a recorded graph.
    """
    call, tensors = ROWS[row](device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    functions: dict[str, Function] = {
        "bare launch": bare_launch(lambda: call(*tensors)),
        "fastattn": lambda: call(*tensors),
    }
    if not row.startswith("decode"):
        functions["fastattn with grad"] = lambda: call(*leaves)
    return functions


def calls_by_backend() -> dict[str, Function]:
    """Small calls on a GPU by `auto`, the portable kernels and torch's function, by name.

    Each forward, and forward and backward, plain and in a region of autocast.
    """
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    leaves = [torch.randn(_SHAPE, **how) for _ in range(3)]
    do = torch.randn_like(leaves[0])
    attends: dict[str, Callable[..., Tensor]] = {
        "fastattn": partial(fused_attention.attention, causal=True),
        "fastattn-triton": partial(fused_attention.attention, causal=True, backend="triton"),
        "sdpa": partial(F.scaled_dot_product_attention, is_causal=True),
    }

    def forward(attends: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            return attends(*leaves)

    def both(attends: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(attends(*leaves), leaves, do)

    def cast(call: Function) -> object:
        with torch.autocast("cuda", torch.bfloat16):
            return call()

    ways = {"forward": forward, "forward and backward": both}
    plain: dict[str, Function] = {
        f"{name}, {way}": partial(call, function)
        for name, function in attends.items()
        for way, call in ways.items()
    }
    return plain | {f"{name}, autocast": partial(cast, call) for name, call in plain.items()}


Call = tuple[Callable[..., Any], list[Tensor]]


def _dense(device: str, **options: Tensor) -> Call:
    on_device: dict[str, Any] = {name: x.to(device) for name, x in options.items()}
    tensors = [torch.randn(_SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return partial(fused_attention.attention, causal=True, backend="triton", **on_device), tensors


def _packed(device: str) -> Call:
    _, tensors = _dense(device)
    offsets = torch.tensor([0, 30, _SHAPE[2]], dtype=torch.int32, device=device)
    call = partial(
        fused_attention.attention_varlen, cu_seqlens_q=offsets, causal=True, backend="triton"
    )
    return call, [x[0].transpose(0, 1).contiguous() for x in tensors]


def _decode(device: str, paged: bool) -> Call:
    """One new token with a cache of 64, without split keys."""
    k, v = (torch.randn(_SHAPE, device=device, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([60], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device) if paged else None
    view = view_of_tensors(k, v, lengths, block_table=table)
    call = partial(decode.decode_attention, cache=view, num_splits=1, backend="triton")
    return call, [k[:, :, :1].contiguous()]


# By their arguments other than q, k and v.
ROWS: dict[str, Callable[[str], Call]] = {
    "plain": _dense,
    "key_lengths": partial(_dense, key_lengths=torch.tensor([60])),
    "alibi_slopes": partial(_dense, alibi_slopes=torch.ones(_SHAPE[1])),
    "attn_bias": partial(_dense, attn_bias=torch.zeros(_SHAPE[2], _SHAPE[2])),
    "key_padding_mask": partial(_dense, key_padding_mask=torch.ones(1, 64, dtype=torch.bool)),
    "documents": partial(_dense, documents=torch.zeros(1, 64, dtype=torch.int32)),
    "packed": _packed,
    "decode": partial(_decode, paged=False),
    "decode, paged": partial(_decode, paged=True),
}


def bare_launch(call: Function) -> Function:
    """The kernel launches of `call` alone, with the same arguments.

    Returns the compiled kernel of the last one.
    """
    launched: list[Function] = []
    run = triton.JITFunction.run

    def remember(*args: Any, **kwargs: Any) -> Any:
        launched.append(partial(run, *args, **kwargs))
        return run(*args, **kwargs)

    # A memoised launch would bypass `run`.
    launches.forget()
    call_memo.forget()
    with mock.patch.object(triton.JITFunction, "run", remember):
        call()
    if len(launched) == 1:
        return launched[0]
    return lambda: [launch() for launch in launched][-1]


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Launch kernels on CPU tensors, compiled for sm_90, without computation.

    Raises:
        RuntimeError: Triton interprets its kernels in this process.
    """
    with (
        compiling_for("sm_90"),
        # Few instructions per thread, for fast compilation.
        tiles.forced(**dict.fromkeys(tiles.KERNELS, tiles.TileConfig(16, 16, 4, 1))),
        mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None),
    ):
        try:
            yield
        finally:
            call_memo.forget()


_IMPORT = """
import time, torch, triton
begin = time.perf_counter()
import fastattn
print(1e3 * (time.perf_counter() - begin))
"""


def import_ms() -> float:
    """Milliseconds that `import fastattn` adds to importing torch and triton, in a new process."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    # Ends a process that hangs; a loaded machine imports for half a minute.
    how: dict[str, Any] = {"env": variables, "cwd": tempfile.gettempdir(), "timeout": 600}
    command = [sys.executable, "-c", _IMPORT]
    return float(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **how).stdout
    )
