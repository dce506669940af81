"""What the model of speed says of the kernels that ship: a bound for each, from machine code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...kernels.backward import launch_backward, launch_backward_one_pass
from ...kernels.forward import launch_forward
from ...kernels.hopper.backward import launch_hopper_backward
from ...kernels.hopper.forward import launch_hopper_forward, launch_hopper_forward_fp8
from ...kernels.hopper.tile_table import (
    APART_HEAD_DIM,
    HopperConfig,
    backward_config,
    forward_config,
    fp8_config,
)
from ...kernels.launch import tiles
from ...options import Options
from ...testing.compiling.cross_compile import CompiledFacts, compiling_for, describe
from ...testing.compiling.sass import Loop
from ...testing.compiling.speed import Clocks, loop_clocks, programs_at_once

TARGET = "sm_90"
# Of an H100 or H200 SXM: multiprocessors, and their clock at its highest; and of an H200 what its
# memory gives.
MULTIPROCESSORS, GHZ, TERABYTES = 132, 1.83, 4.8
_CONSUMER_ROWS = 64
# Of a pair, 2 D operations each.
PRODUCTS = {
    "forward": 2,
    "forward_fp8": 2,
    "dq": 3,
    "dkv": 4,
    "dv": 2,
    "dk": 3,
    "one_pass": 5,
    "one_pass_dv": 2,
    "one_pass_dk_dq": 4,
}


class Bound(NamedTuple):
    """A kernel's full blocks, without a mask: clocks of a multiprocessor for a (query, key) pair.

    kernel: "forward", "dq", "dkv" or "one_pass", or where dK and dV are apart "dv" and "dk", or
    "one_pass_dv" and "one_pass_dk_dq"; "forward_fp8" of e4m3 numbers. instructions: of a pass of
    the loop by a warp.
    """

    backend: str
    kernel: str
    D: int
    instructions: int
    clocks: Clocks

    @property
    def tflops(self) -> float:
        """All products that the kernel makes, at GHZ."""
        rate = MULTIPROCESSORS * GHZ * 1e9 / self.clocks.bound
        return PRODUCTS[self.kernel] * 2 * self.D * rate / 1e12


def bounds(D: int) -> Iterator[Bound]:
    """On sm_90, compiled by the Triton that is installed; nothing runs."""
    q = torch.empty(1, 4, 1024, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 4, 1024, device="meta")
    options = Options(scale=0.1)
    with compiling_for(TARGET) as launched:
        launch_forward(q, q, q, options)
        launch_backward(q, None, q, q, q, q, lse, options)
    yield from _portable(launched, D, {"forward": "forward", "dq": "dq", "dkv": "dkv"})
    with compiling_for(TARGET) as launched:
        launch_backward_one_pass(q, None, q, q, q, q, lse, options)
    yield from _portable(launched, D, {"dkv": "one_pass"})
    with compiling_for(TARGET) as launched:
        launch_hopper_forward(q, q, q, options)
        launch_hopper_backward(q, None, q, q, q, q, lse, options)
    yield from _hopper(launched, D, {"forward": "forward", "dq": "dq", "dkv": "dkv"})
    codes, scale = q.to(torch.float8_e4m3fn), torch.empty(1, 4, device="meta")
    with compiling_for(TARGET) as launched:
        launch_hopper_forward_fp8(codes, codes, codes.mT, (scale,) * 3, q.dtype, options)
    yield from _hopper(launched, D, {"forward": "forward_fp8"})
    if D != APART_HEAD_DIM:
        with compiling_for(TARGET) as launched:
            launch_hopper_backward(q, None, q, q, q, q, lse, options._replace(atomic_dq=True))
        yield from _hopper(launched, D, {"dkv": "one_pass"})


def _named(launched: list[Any], names: dict[str, str]) -> Iterator[tuple[str, CompiledFacts]]:
    """The kernels with loops over blocks, by the names that they get."""
    for fact in map(describe, launched):
        for name, kernel in names.items():
            if fact.name.endswith(f"{name}_kernel") and fact.loops:
                yield kernel, fact


def _portable(launched: list[Any], D: int, names: dict[str, str]) -> Iterator[Bound]:
    apart = {"dkv": ["dk", "dv"], "one_pass": ["one_pass_dk_dq", "one_pass_dv"]}
    for kernel, fact in _named(launched, names):
        row = kernel if kernel == "forward" else f"backward_{kernel}"
        tile = tiles.tile_of(TARGET, row, 2, D)
        loop = min(fact.loops, key=lambda loop: loop.total)
        programs = programs_at_once(fact)
        clocks = loop_clocks(loop, TARGET, tile.num_warps, programs=programs)
        if kernel in apart and tile.apart:
            kernel = apart[kernel].pop()  # V's launch comes first
        yield Bound("triton", kernel, D, loop.total, clocks / (tile.BLOCK_M * tile.BLOCK_N))


def _hopper(launched: list[Any], D: int, names: dict[str, str]) -> Iterator[Bound]:
    apart = iter(("dv", "dk"))
    for kernel, fact in _named(launched, names):
        if kernel == "dkv" and D == APART_HEAD_DIM:
            kernel = next(apart)
        if kernel == "forward":
            config = forward_config(D, False)
        elif kernel == "forward_fp8":
            config = fp8_config(D, False)
        else:
            config = backward_config(kernel, D, False, False)
        loop = min(fact.loops, key=lambda loop: loop.total)
        yield Bound("hopper", kernel, D, loop.total, hopper_clocks(loop, config))


def hopper_clocks(loop: Loop, config: HopperConfig) -> Clocks:
    """Clocks of a pair of query and key in the loop of a consumer over full blocks."""
    rows = config.BLOCK * config.D
    # In a step TMA brings two tiles, for all consumers, and takes dQ in fp32, a part of its columns
    # from each.
    element_size = 1 if loop.count("QGMMA") else 2
    streamed = (2 * element_size + 4 * loop.count("UTMAREDG")) * rows // config.CONSUMERS
    clocks = loop_clocks(loop, TARGET, 4, programs=2, streamed_bytes=streamed)
    return clocks / (_CONSUMER_ROWS * config.BLOCK)


def rows_of(D: int) -> list[dict[str, Any]]:
    """The bounds of a head dim as JSON values."""
    return [
        {
            "backend": bound.backend,
            "kernel": bound.kernel,
            "D": bound.D,
            "instructions": bound.instructions,
            **{
                unit: round(getattr(bound.clocks, unit), 4)
                for unit in ("issue", "tensor", "shared", "exponentials", "bound")
            },
            "tflops": round(bound.tflops),
        }
        for bound in bounds(D)
    ]
