"""Other sizes of a launch compile no other kernel: B, T, lengths and strides are no constants."""

import compiled_cases
import pytest

from fastattn.testing.compiling.compile_pool import CompilePool

LENGTHS = "T=1 T=4096 T=77"
DECODE = "B=1 B=16 T=2 H_k=1 H_q=2 H_q=32,H_k=16 splits=2 splits=16 table_width=1 table_width=16"
APPEND = "T=16 T=4096 H_k=1 H_q=16 slots=16 slots=257 B=1 T=1 table_width=1 table_width=16"
HOPPER = [f"hopper {x} 128 causal" for x in ("forward", "backward", "one-pass")]
# Launches, other sizes of them, and how many kernels compile: at first, and for each size that
# compiles any, by its place.
NEW_SIZES: list[tuple[list[str], str, int, dict[int, int]]] = [
    # Of one key, dK and dV are split over the heads of a group: what adds them up comes once.
    (
        ["attention forward+backward 128 causal", "attention one-pass 64 masks"],
        "T=1 T=4095 T=16 B=1 B=33 H_k=4 H_k=1", 7, {1: 1},
    ),
    # Only what TMA cannot walk has a kernel of its own: one row, one key, rows of odd lengths.
    (
        ["biases 64"],
        "B=1,M=4096,N=4096 H=1 B=1,M=1 H=1,N=1 B=1,H=1,M=1,N=1 M=1,N=1 B=1,M=63,N=63", 1, {3: 1},
    ),
    # Beside a table of blocks, where the whole's number of heads is the same or another.
    (["heads 64"], "first=0 first=16 first=7", 2, {}),
    (["statistics 64 bf16"], "T=1 T=4096 B=1 B=16 H_k=1 H_q=16", 4, {}),
    (["selected 64 bf16"], "T=1 T=4096 B=1 B=16 n=1 n=5 H_q=2,T=1 H_q=2 H_q=2,n=5", 3, {7: 3}),
    (["block_scores 64 bf16"], "T=1 T=4096 B=1 first=5", 2, {}),
    # Of tops, only the power of two above compiles.
    (["statistics 64 bf16"], "top=7", 4, {}),
    (["decode contiguous 128"], f"{DECODE} slots=1 slots=16 slots=4095", 2, {}),
    (["decode paged 128"], f"{DECODE} slots=128 slots=512", 2, {}),
    (["decode ring 128"], f"{DECODE} slots=16 slots=4095", 2, {}),
    # Keys that are not split, and more than 16 rows in a K/V head, are kinds of their own.
    (["decode contiguous 128"], "splits=1 splits=1,B=16,slots=16 T=64 T=5,B=1", 2, {1: 1, 3: 1}),
    # Tiles of 16 rows and of 64 with split keys, the merge, and, of few pages, without.
    (
        ["packed 32"],
        "B=1 B=16 total=64 total=17 pages=1 pages=16 H_q=16,H_k=16 H_q=2,H_k=2 longest=5 "
        "page_size=32", 3, {5: 2},
    ),
    (["tangent 128 causal"], "T=1 T=4096", 1, {}),
    (["few_queries"], "by_token=1 by_token=1,T=1000,H_k=8", 2, {}),
    (["append contiguous - half"], f"{APPEND} slots=1", 1, {}),
    # Positions are divided by a page size that is no power of two: a kernel of its own.
    (["append paged fp8 half"], f"slots=1 {APPEND}", 1, {1: 1}),
    (["append ring int8 interleaved 256"], f"{APPEND} slots=1", 1, {}),
    (["append slots fp8 half"], "T=1 T=4096 T=17", 1, {}),
    (HOPPER, LENGTHS, 6, {}),
    (["hopper forward 128 mask_mod"], LENGTHS, 2, {}),
    (
        ["hopper_fp8 128 causal", "hopper_fp8 128 packed", "fp8_codes 128"],
        f"{LENGTHS} B=1 H=1 H=16", 10, {},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("launches", "others", "first", "later"), NEW_SIZES, ids=str)
def test_a_new_size_compiles_nothing(
    launches: list[str], others: str, first: int, later: dict[int, int], compile_pool: CompilePool
) -> None:
    pairs = [[x.split("=") for x in size.split(",")] for size in others.split()]
    sizes = [{}, *({name: int(n) for name, n in size} for size in pairs)]
    function = f"{compiled_cases.__file__}:compilations"
    actual = compile_pool.call(function, "sm_90", launches=launches, sizes=sizes)
    assert actual == [first, *(later.get(i, 0) for i in range(1, len(sizes)))]
