"""Candidate tiles of a kernel, and their registers and shared memory, compiled before a launch."""

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
# BLOCK_M, the rows of a query tile. A new token fills them with its query heads on one key head.
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
# Kernels whose programs each hold a block of keys and loop over the queries.
BY_KEYS = ("backward_dkv", "backward_one_pass")


@dataclass(frozen=True)
class TableEntry:
    """What a row of a tuning table is for: kernel, bytes of an element, padded head dim."""

    kernel: str
    element_size: int
    BLOCK_D: int

    def case(self, causal: bool) -> Case:
        """The case that tiles are timed on: 16384 tokens in sequences of 4096, hidden size 2048.

        Decoding: caches of 4096 tokens, four query heads to a key/value head, always causal.
        """
        H = 2048 // self.BLOCK_D
        direction = "forward" if self.kernel == "forward" else "backward"
        dtype = "bfloat16" if self.element_size == 2 else "float32"
        if self.kernel in _NEW_TOKENS:
            tokens = _NEW_TOKENS[self.kernel]
            one = Case("decode", "forward", 16, H, H // 4, tokens, 4096, self.BLOCK_D, causal=True)
            return replace(one, dtype=dtype, layout="bhtd")
        return Case(direction, direction, 4, H, H, 4096, 4096, self.BLOCK_D, causal, dtype=dtype)  # type: ignore[arg-type]


ENTRIES: tuple[TableEntry, ...] = tuple(
    TableEntry(kernel, size, D)
    for size, D in ((2, 128), (2, 64), (2, 256), (4, 64), (4, 128), (4, 256))
    for kernel in ("forward", "backward_dkv", "backward_dq", "backward_one_pass")
) + tuple(
    TableEntry(kernel, size, D) for size in (2, 4) for D in (128, 64, 256) for kernel in _NEW_TOKENS
)


def candidates(entry: TableEntry, shared_bytes: int, arch: str) -> list[TileConfig]:
    """Tiles worth compiling for an entry, the largest first.

    Left out without a compilation: tiles whose accumulators alone would fill the registers, those
    whose operands cannot fit `shared_bytes`, and those with warps that have no rows of their own.
    Every tile sums in as many parts as the tile in use. Forward tiles come with pointer loads and,
    on GPUs with TMA, with descriptors too; tiles for dK and dV of many columns with both in one
    launch and with one each.
    """
    usual = tiles.tile_of(arch, entry.kernel, entry.element_size, entry.BLOCK_D)
    rows = _ROWS.get(entry.kernel, (32, 64, 128))
    stages = (1, 2) if entry.kernel == "backward_one_pass" else (1, 2, 3)
    grid = itertools.product(rows, (32, 64, 128), (4, 8), stages)
    apart = (False, True) if entry.kernel == "backward_dkv" and entry.BLOCK_D > 128 else (False,)
    sizes = [
        TileConfig(*numbers, sum_parts=usual.sum_parts, apart=each)
        for numbers in grid
        for each in apart
    ]
    fitting = [t for t in sizes if _plausible(entry, t, shared_bytes, arch)]
    fitting.sort(key=lambda t: (-t.BLOCK_M * t.BLOCK_N, abs(t.num_stages - 2)))
    loads = (False, True) if arch in _TMA and entry.kernel == "forward" else (False,)
    return [replace(tile, descriptors=load) for tile in fitting[:_MOST] for load in loads]


def _plausible(entry: TableEntry, tile: TileConfig, shared_bytes: int, arch: str) -> bool:
    D, threads = entry.BLOCK_D, 32 * tile.num_warps
    backward = entry.kernel.startswith("backward")
    by_keys = entry.kernel in BY_KEYS
    held, streamed = (tile.BLOCK_N, tile.BLOCK_M) if by_keys else (tile.BLOCK_M, tile.BLOCK_N)
    kept = 2 if by_keys and not tile.apart else 1
    accumulators = held * D * kept + tile.BLOCK_M * tile.BLOCK_N * (1 + backward)
    most = 224
    if entry.kernel == "backward_one_pass":
        accumulators += streamed * D
        most = 192  # this kernel also holds the most pointers
    if arch == "sm_90" and 64 <= held < 16 * tile.num_warps:
        return False  # wgmma takes 64 rows for four warps: the others would compute the same again
    operands = held * D * (2 if backward else 1) + tile.num_stages * 2 * streamed * D
    return accumulators / threads <= most and operands * entry.element_size <= shared_bytes


def launch_once(kernel: str, element_size: int, D: int, causal: bool, tile: dict[str, Any]) -> None:
    """Launch a kernel with this tile, to be compiled only: runs in a process of `CompilePool`."""
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
    """Worker processes that compile candidates into Triton's disk cache before they are timed.

    Args:
        arch: name of the GPU's architecture. One that `cross_compile.TARGETS` lacks compiles
            nothing ahead.
        workers: processes.
    """

    def __init__(self, arch: str, workers: int) -> None:
        self._arch = arch
        self._pool = CompilePool(workers) if arch in TARGETS else None
        self._futures: dict[tuple[TableEntry, TileConfig, bool], Future[list[CompiledFacts]]] = {}

    def submit(self, entry: TableEntry, tile: TileConfig) -> None:
        """Start to compile a candidate, causal and not; decoding is causal only."""
        both = (True,) if entry.kernel in _NEW_TOKENS else (True, False)
        for causal in both if self._pool else ():
            assert self._pool is not None
            self._futures[entry, tile, causal] = self._pool.submit(
                "fastattn.bench.tuning.candidates:launch_once",
                self._arch,
                kernel=entry.kernel,
                element_size=entry.element_size,
                D=entry.BLOCK_D,
                causal=causal,
                tile=asdict(tile),
            )

    def why_not(self, entry: TableEntry, tile: TileConfig, seconds: float) -> str | None:
        """Why a candidate is not worth a launch, waiting at most `seconds`; None if it is."""
        for causal in (True, False):
            future = self._futures.pop((entry, tile, causal), None)
            if future is None:
                continue
            try:
                facts = future.result(timeout=max(0.0, seconds))
            except FutureTimeoutError:  # in Python 3.10 it is not the built-in one
                return "was not compiled in time"
            except BrokenProcessPool:
                continue  # a candidate crashed the compiler: the rest compile at their launch
            except Exception as error:
                return f"does not compile: {' '.join(str(error).split())[:200]}"
            for fact in facts:
                if fact.name != KERNEL_OF[entry.kernel]:
                    continue
                if fact.spills_in_loops:
                    return f"spills {fact.spill_store_bytes} bytes a thread"
                if not fact.fits_shared_memory:
                    return f"needs {fact.shared_bytes} bytes of shared memory"
        return None

    def facts(self, entry: TableEntry, tile: TileConfig) -> list[CompiledFacts] | None:
        """The compiled kernels of a candidate, causal and not; None if it does not compile."""
        found: list[CompiledFacts] = []
        for causal in (True, False):
            future = self._futures.pop((entry, tile, causal), None)
            try:
                found += [] if future is None else future.result()
            except (CrossCompileError, BrokenProcessPool):
                return None
        return found

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
