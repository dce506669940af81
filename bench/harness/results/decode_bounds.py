"""What the model of speed says of decoding: whether a kernel keeps up with the memory it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.decode import launch_decode
from ...kernels.launch import tiles
from ...kernels.rules.pages import CacheTensors
from ...options import Options
from ...testing.compiling.cross_compile import compiling_for, describe
from ...testing.compiling.speed import Clocks, loop_clocks, programs_at_once
from .bounds import GHZ, MULTIPROCESSORS, TARGET, TERABYTES

_STORED = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_H_Q, _H_K = 32, 8


class Cache(NamedTuple):
    """What is decoded from.

    stored: "bf16", or "int8" or "fp8" with a scale for each row. page: positions of a page; None:
    rows without pages.
    """

    stored: str
    D: int
    page: int | None = None

    @property
    def bytes_of_key(self) -> int:
        """Of a key, its value and their scales, which a step reads from memory."""
        scales = 0 if self.stored == "bf16" else 2 * 4
        return 2 * self.D * _STORED[self.stored].itemsize + scales


CACHES = (
    *(Cache("bf16", D) for D in (64, 128, 256)),
    Cache("bf16", 128, 64),
    *(Cache(stored, 128, page) for stored in ("int8", "fp8") for page in (None, 64)),
)


def row_of(cache: Cache) -> dict[str, Any]:
    """The bound of a new token of 32 heads beside a cache of 8, as JSON values.

    Clocks of a multiprocessor for a key of a head, on each unit and by its share of the memory.
    """
    loop, clocks = _clocks(cache)
    memory = cache.bytes_of_key * MULTIPROCESSORS * GHZ / (TERABYTES * 1000)
    bound = max(clocks.bound, memory)
    units = ("issue", "tensor", "shared", "exponentials")
    return {
        "cache": cache.stored,
        "page": cache.page,
        "D": cache.D,
        "instructions": loop,
        **{unit: round(getattr(clocks, unit), 3) for unit in units},
        "memory": round(memory, 3),
        "bound": round(bound, 3),
        "tb_s": round(cache.bytes_of_key * MULTIPROCESSORS * GHZ / bound / 1000, 2),
    }


def _clocks(cache: Cache) -> tuple[int, Clocks]:
    """Instructions of a warp in a full block, and its clocks by key."""
    stored, D, page = cache

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, slots = 2, page or 4096
    numbers = meta(rows, _H_K, slots, D, dtype=_STORED[stored])
    scale = None if stored == "bf16" else meta(rows, _H_K, slots, dtype=torch.float32)
    table = None if page is None else meta(rows, 4096 // page)
    tensors = CacheTensors(numbers, numbers, scale, scale, table, meta(rows), None, None, None)
    q = meta(rows, _H_Q, 1, D, dtype=torch.bfloat16)
    with compiling_for(TARGET) as launched:
        launch_decode(q, tensors, None, None, Options(scale=0.1, causal=True), splits=4)
    fact = next(x for x in map(describe, launched) if x.name == "decode_kernel")
    loop = min(fact.loops, key=lambda loop: loop.total)
    tile = tiles.tile_of(TARGET, "decode", q.element_size(), D)
    clocks = loop_clocks(loop, TARGET, tile.num_warps, programs=programs_at_once(fact))
    return loop.total, clocks / tile.BLOCK_N
