"""The launches of packed queries compile for every GPU: no spills in loops, once for all sizes."""

import pytest
import torch
from nightly import gate_cases

from fastattn.kernels.combine import combine_kernel
from fastattn.kernels.decode import decode_kernel, launch_packed
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import count_compilations

# Bytes a thread outside of loops, once a program: what was found of chunks on sm_80.
MOST_SPILLED = 136
STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def launch(
    D: int = 128,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    options: str = "plain",
    page_size: int = 16,
    B: int = 17,
    total: int = 90,
    longest: int | None = None,
    H_q: int = 8,
    H_k: int = 2,
    pages: int = 300,
) -> None:
    """A step of a server on meta tensors; K and V of a page lie side by side, as vLLM has them."""
    numbers: torch.dtype = getattr(torch, dtype)

    def meta(*shape: int, dtype: torch.dtype = numbers) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    stored = STORAGE.get(quantize, numbers)
    both = meta(40, H_k, page_size, 2 * D, dtype=stored)
    scale = None if quantize is None else meta(1, H_k, 1, dtype=torch.float32)
    scale = None if scale is None else scale.expand(40, H_k, page_size)
    lengths = meta(B, dtype=torch.int32)
    table = meta(B, pages, dtype=torch.int32)
    cache = CacheTensors(
        both[..., :D], both[..., D:], scale, scale, table, lengths, lengths, None, None
    )
    given = Options(scale=0.1, causal=True)
    if options == "scores":
        slopes = meta(H_q, dtype=torch.float32)
        given = given._replace(
            left=900, keep_first=4, softcap=30.0, alibi_slopes=slopes, sinks=slopes
        )
    elif options == "tree":
        given = given._replace(tree_mask=meta(total, 64, dtype=torch.bool))
    q, o = meta(total, H_q, D), meta(total, H_q, D)
    lse = meta(H_q, total, dtype=torch.float32)
    longest = total if longest is None else longest
    offsets = meta(B + 1, dtype=torch.int32)
    launch_packed(q, offsets, cache, None, o, lse, given, longest=longest)


# target, head dim, dtype, codes, options
CASES = gate_cases(
    [("sm_90", 128, "bfloat16", None, "plain")],
    [
        *(
            (target, 128, "bfloat16", quantize, "plain")
            for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
            for quantize in (None, "int8", "fp8")
            if (target, quantize) != ("sm_90", None)
        ),
        *(
            (target, 128, "bfloat16", None, options)
            for target in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
            for options in ("scores", "tree")
        ),
        *(("sm_90", D, dtype, None, "plain") for D, dtype in ((64, "float16"), (256, "bfloat16"))),
        *((target, 64, "float32", None, "plain") for target in ("sm_80", "sm_90", "gfx942")),
    ],
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_well(case: tuple, compile_pool: CompilePool) -> None:
    target, D, dtype, quantize, options = case
    given = {"D": D, "dtype": dtype, "quantize": quantize, "options": options}
    # What merges the parts of a chunk is compiled already.
    few, merge, chunk = compile_pool.submit(f"{__file__}:launch", target, **given).result()
    assert [x.name for x in (few, merge, chunk)] == [
        "decode_kernel", "combine_kernel", "decode_kernel",
    ]  # fmt: skip
    for fact in (few, merge, chunk):
        assert all(loop.spills == 0 for loop in fact.loops), fact.name
        assert fact.spill_store_bytes <= MOST_SPILLED, fact.name
        assert fact.fits_shared_memory, f"{fact.shared_bytes} bytes of shared memory"
        assert fact.warnings == ()
    if case[2] != "float32":
        assert few.mma and chunk.mma


def compilations() -> list[int]:
    """How many kernels each launch compiled: the first, and others of all sizes that may change."""
    for kernel in (decode_kernel, combine_kernel):
        kernel.device_caches.clear()  # what other tests compiled in the same worker
    sizes = [{}, {"B": 1}, {"B": 16}, {"total": 64}, {"total": 17}, {"pages": 1}, {"pages": 16}]
    sizes += [{"H_q": 16, "H_k": 16}, {"H_q": 2, "H_k": 2}, {"longest": 5}, {"page_size": 32}]
    return [count_compilations(lambda given=given: launch(D=32, **given)) for given in sizes]


def test_a_new_size_compiles_nothing(compile_pool: CompilePool) -> None:
    """Tiles of 16 rows and of 64 with split keys, the merge, and, of few pages, without."""
    found = compile_pool.call(f"{__file__}:compilations", "sm_90")
    assert found == [3, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
