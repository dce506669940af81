"""Tiles that a kernel may take, and what the compilers make of each, ahead of a launch."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch

from ... import dispatch
from ...functional import attend
from ...kernels.decode import launch_decode
from ...kernels.launch import tiles
from ...kernels.launch.tiles import TileConfig
from ...kernels.rules.pages import CacheTensors
from ...options import Options
from ...testing.compiling.compile_pool import CompilePool, CrossCompileError
from ...testing.compiling.cross_compile import TARGETS, CompiledFacts
from ..cases import Case

_MOST = 24  # candidates of a row, each with both kinds of loads
_TMA = ("sm_90", "sm_100")
# Rows of a tile of queries. Those of a new token are its query heads on one key head.
_ROWS = {
    "forward": (64, 128),
    "backward_one_pass": (16, 32, 64),
    "decode": (16,),
    "decode_chunk": (16, 32, 64),
}
KERNEL_OF = {
    "forward": "attention_forward_kernel",
    "backward_dq": "attention_backward_dq_kernel",
    "backward_dkv": "attention_backward_dkv_kernel",
    "backward_one_pass": "attention_backward_dkv_kernel",
    "decode": "decode_kernel",
    "decode_chunk": "decode_kernel",
}
_NEW_TOKENS = {"decode": 1, "decode_chunk": 64}
# Kernels of which a program stays at its keys while queries stream by.
BY_KEYS = ("backward_dkv", "backward_one_pass")


@dataclass(frozen=True)
class Place:
    """A row of a tuning table: kernel, bytes of an element, padded head dim."""

    kernel: str
    element_size: int
    BLOCK_D: int

    def case(self, causal: bool) -> Case:
        """What its tiles are timed on: 16384 tokens in sequences of 4096, hidden size 2048.

        For decoding, caches of 4096 tokens, four query heads to each of their own, always causal.
        """
        H = 2048 // self.BLOCK_D
        direction = "forward" if self.kernel == "forward" else "backward"
        dtype = "bfloat16" if self.element_size == 2 else "float32"
        if self.kernel in _NEW_TOKENS:
            tokens = _NEW_TOKENS[self.kernel]
            return Case(
                "decode", "forward", 16, H, H // 4, tokens, 4096, self.BLOCK_D, causal=True,
                dtype=dtype, layout="bhtd",
            )  # fmt: skip
        return Case(direction, direction, 4, H, H, 4096, 4096, self.BLOCK_D, causal, dtype=dtype)  # type: ignore[arg-type]


PLACES: tuple[Place, ...] = tuple(
    Place(kernel, size, D)
    for size, D in ((2, 128), (2, 64), (2, 256), (4, 64), (4, 128), (4, 256))
    for kernel in ("forward", "backward_dkv", "backward_dq", "backward_one_pass")
) + tuple(
    Place(kernel, size, D) for size in (2, 4) for D in (128, 64, 256) for kernel in _NEW_TOKENS
)


def candidates(place: Place, shared_bytes: int, arch: str) -> list[TileConfig]:
    """Tiles that may suit a row, those with the larger tiles first.

    Left out without a compilation: tiles whose accumulators alone would fill the registers, and
    those whose operands cannot fit `shared_bytes`. All keep sums as the tile in use does, and where
    there is TMA, forward tiles come with it and without.
    """
    usual = tiles.tile_of(arch, place.kernel, place.element_size, place.BLOCK_D)
    rows = _ROWS.get(place.kernel, (32, 64, 128))
    stages = (1, 2) if place.kernel == "backward_one_pass" else (1, 2, 3)
    grid = itertools.product(rows, (32, 64, 128), (4, 8), stages)
    sizes = [TileConfig(*numbers, sum_parts=usual.sum_parts) for numbers in grid]
    fitting = [t for t in sizes if _plausible(place, t, shared_bytes)]
    fitting.sort(key=lambda t: (-t.BLOCK_M * t.BLOCK_N, abs(t.num_stages - 2)))
    loads = (False, True) if arch in _TMA and place.kernel == "forward" else (False,)
    return [replace(tile, descriptors=load) for tile in fitting[:_MOST] for load in loads]


def _plausible(place: Place, tile: TileConfig, shared_bytes: int) -> bool:
    D, threads = place.BLOCK_D, 32 * tile.num_warps
    backward = place.kernel.startswith("backward")
    by_keys = place.kernel in BY_KEYS
    held, streamed = (tile.BLOCK_N, tile.BLOCK_M) if by_keys else (tile.BLOCK_M, tile.BLOCK_N)
    accumulators = held * D * (2 if by_keys else 1) + tile.BLOCK_M * tile.BLOCK_N * (1 + backward)
    most = 224
    if place.kernel == "backward_one_pass":
        accumulators += streamed * D
        most = 144  # it has the most pointers beside them
    operands = held * D * (2 if backward else 1) + tile.num_stages * 2 * streamed * D
    return accumulators / threads <= most and operands * place.element_size <= shared_bytes


def launch_once(kernel: str, element_size: int, D: int, causal: bool, tile: dict[str, Any]) -> None:
    """Launch what uses a kernel, with a tile, for the stand-in driver of a compiling process."""
    dtype = torch.bfloat16 if element_size == 2 else torch.float32
    if kernel in _NEW_TOKENS:
        with tiles.forced(**{kernel: TileConfig(**tile)}):
            _decode_once(_NEW_TOKENS[kernel], D, dtype)
        return
    q, k, v = (torch.zeros(1, 256, 1, D, dtype=dtype).transpose(1, 2) for _ in range(3))
    leaves = [x.requires_grad_(kernel != "forward") for x in (q, k, v)]
    with (
        tiles.forced(**{kernel: TileConfig(**tile)}),
        mock.patch.object(dispatch, "why_not_triton", lambda *tensors: None),
    ):
        permitted = kernel == "backward_one_pass"
        o = attend.attention(*leaves, causal=causal, backend="triton", deterministic=not permitted)
        if kernel != "forward":
            torch.autograd.grad(o, leaves, torch.zeros_like(o))


def _decode_once(tokens: int, D: int, dtype: torch.dtype) -> None:
    q, k = (torch.zeros(1, H, T, D, dtype=dtype) for H, T in ((4, tokens), (1, 256)))
    lengths = torch.full((1,), 256, dtype=torch.int32)
    cache = CacheTensors(k, k, None, None, None, lengths, lengths, None, None)
    launch_decode(q, cache, None, None, Options(scale=1.0, causal=True), splits=2)


class Compilation:
    """Compiles candidates ahead, in other processes, where their results land in Triton's cache.

    Args:
        arch: name of the GPU's architecture; others than `cross_compile.TARGETS` are not compiled
            ahead.
        workers: processes.
    """

    def __init__(self, arch: str, workers: int) -> None:
        self._arch = arch
        self._pool = CompilePool(workers) if arch in TARGETS else None
        self._futures: dict[tuple[Place, TileConfig, bool], Future[list[CompiledFacts]]] = {}

    def submit(self, place: Place, tile: TileConfig) -> None:
        """Start with a candidate, causal and not; decoding is causal."""
        both = (True,) if place.kernel in _NEW_TOKENS else (True, False)
        for causal in both if self._pool else ():
            assert self._pool is not None
            self._futures[place, tile, causal] = self._pool.submit(
                "fastattn.bench.tuning.candidates:launch_once",
                self._arch,
                kernel=place.kernel,
                element_size=place.element_size,
                D=place.BLOCK_D,
                causal=causal,
                tile=asdict(tile),
            )

    def why_not(self, place: Place, tile: TileConfig, seconds: float) -> str | None:
        """Why a candidate is not worth a launch, waiting at most `seconds`; None if it is."""
        for causal in (True, False):
            future = self._futures.pop((place, tile, causal), None)
            if future is None:
                continue
            try:
                facts = future.result(timeout=max(0.0, seconds))
            except FutureTimeoutError:  # in Python 3.10 it is not the built-in one
                return "was not compiled in time"
            except BrokenProcessPool:
                continue  # some candidate has ended the compiler: what is left compiles at launch
            except Exception as error:
                return f"does not compile: {' '.join(str(error).split())[:200]}"
            for fact in facts:
                if fact.name != KERNEL_OF[place.kernel]:
                    continue
                if fact.spills:
                    return f"spills {fact.spill_store_bytes} bytes a thread"
                if not fact.fits_shared_memory:
                    return f"needs {fact.shared_bytes} bytes of shared memory"
        return None

    def facts(self, place: Place, tile: TileConfig) -> list[CompiledFacts] | None:
        """What a candidate came to, causal and not; None if it does not compile."""
        found: list[CompiledFacts] = []
        for causal in (True, False):
            future = self._futures.pop((place, tile, causal), None)
            try:
                found += [] if future is None else future.result()
            except (CrossCompileError, BrokenProcessPool):
                return None
        return found

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
