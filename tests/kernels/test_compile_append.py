"""The append kernel compiles for every GPU without spills, and once for all lengths and strides."""

from concurrent.futures import Future

import pytest
import torch

from fastattn.kernels.append import launch_append
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import count_compilations

STORAGE = {None: torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def launch(
    kind: str = "contiguous",
    quantize: str | None = None,
    rotary: str | None = "half",
    D: int = 128,
    B: int = 2,
    T: int = 5,
    H_q: int = 4,
    H_k: int = 2,
    slots: int = 100,
    table_width: int = 7,
) -> None:
    """Append to one kind of cache, on meta tensors in the layout of a projection."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def tokens(H: int) -> torch.Tensor:
        return meta(B, T, H, D).transpose(1, 2)

    stored = meta(9, H_k, slots, D, dtype=STORAGE[quantize])
    scale = None if quantize is None else meta(9, H_k, slots, dtype=torch.float32)
    per_row = meta(9, dtype=torch.int32)
    table = meta(9, table_width, dtype=torch.int32) if kind == "paged" else None
    new_lengths = None if kind == "contiguous" else meta(B, dtype=torch.int32)
    batch_index = meta(B, dtype=torch.int32) if kind == "paged" else None
    cache = CacheTensors(
        stored,
        stored,
        scale,
        scale,
        table,
        per_row,
        per_row,
        batch_index,
        3 if kind == "ring" else None,
    )
    tables = (None, None) if rotary is None else (meta(64, D // 4, dtype=torch.float32),) * 2
    launch_append(
        tokens(H_q) if rotary else None,
        tokens(H_k),
        tokens(H_k),
        new_lengths,
        cache,
        *tables,
        interleaved=rotary == "interleaved",
        advance=kind != "ring",
    )


def compilations_for_new_shapes() -> list[int]:
    """How many kernels each launch compiled: the first of its kind, then other sizes of each.

    No case below has this head dim: what it compiled in the same worker would not count here.
    """
    sizes = [{}, {"B": 1}, {"T": 1}, {"T": 16}, {"T": 4096}, {"H_k": 1}, {"H_q": 16}]
    sizes += [{"slots": 1}, {"slots": 16}, {"slots": 257}, {"table_width": 1}, {"table_width": 16}]
    return [
        count_compilations(lambda kind=kind, size=size: launch(kind, D=64, **size))
        for kind in ("contiguous", "paged", "ring")
        for size in sizes
    ]


# target, kind of cache, codes, rotary, head dim
CASES = [
    ("sm_80", "paged", "fp8", "half", 128),
    ("sm_90", "paged", "fp8", "half", 128),
    ("sm_100", "paged", "fp8", "half", 128),
    ("gfx942", "paged", "fp8", "half", 128),
    ("sm_80", "contiguous", "int8", None, 40),
    ("sm_90", "contiguous", None, "half", 128),
    ("sm_90", "ring", "int8", "interleaved", 256),
]


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple, Future]:
    """All cases, submitted at once so that every worker has something to do."""
    return {
        case: compile_pool.submit(
            f"{__file__}:launch",
            case[0],
            kind=case[1],
            quantize=case[2],
            rotary=case[3],
            D=case[4],
        )
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_without_spills(case: tuple, compiled: dict[tuple, Future]) -> None:
    (fact,) = compiled[case].result()
    assert fact.name == "append_kernel"
    assert not fact.spills, f"{fact.spill_store_bytes} bytes"
    assert fact.fits_shared_memory
    assert fact.warnings == ()


def test_a_new_size_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_shapes", "sm_90")
    # Positions are divided by a page size that is no power of two: a kernel of its own.
    paged = [1, *6 * [0], 1, *4 * [0]]
    assert counts == [1, *11 * [0], *paged, 1, *11 * [0]]
