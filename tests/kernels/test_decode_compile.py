"""The decode kernels compile for every GPU: no spills, on matrix units, once for all lengths."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
import triton
import triton.language as tl
from nightly import gate_cases

from fastattn.kernels.combine import combine_kernel, launch_merge
from fastattn.kernels.decode import decode_kernel, launch_decode
from fastattn.kernels.forward import launch_few_queries
from fastattn.kernels.launch import tiles
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import (
    RELEASE,
    USUAL_SPILL_BYTES,
    CompiledFacts,
    count_compilations,
    sass_of,
)

MATRIX_OP = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# fp32 rows of 256 columns have no matrix units: the smallest spill that was found.
SPILL_BYTES = {("sm_90", 256, "fp32"): 16, ("sm_100", 256, "fp32"): 16}


@triton.jit
def even_keys(b, h, q_pos, k_pos):
    return tl.where(h > 0, k_pos % 2 == 0, True)


def launch(
    kind: str = "contiguous",
    D: int = 128,
    dtype: str = "bf16",
    quantize: str | None = None,
    T: int = 1,
    options: str = "plain",
    B: int = 2,
    H_q: int = 8,
    H_k: int = 2,
    slots: int = 4096,
    table_width: int = 300,
    splits: int | None = 4,
) -> None:
    """Decode from one kind of cache, on meta tensors."""

    def meta(*shape: int, dtype: torch.dtype = DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    per_row = meta(9, dtype=torch.int32)
    # Somebody else's rows may be parts of longer ones, which start anywhere.
    width = D + 2 if kind == "sliced" else D
    stored = meta(9, H_k, slots, width, dtype=STORAGE.get(quantize, DTYPES[dtype]))[..., :D]
    scale = None if quantize is None else meta(9, H_k, slots, dtype=torch.float32)
    paged = kind == "paged"
    cache = CacheTensors(
        stored,
        stored,
        scale,
        scale,
        meta(9, table_width, dtype=torch.int32) if paged else None,
        per_row,
        per_row,
        per_row[:B] if paged else None,
        3 if kind == "ring" else None,
    )
    given = Options(scale=0.1, causal=True)
    if options == "scores":
        slopes = meta(H_q, dtype=torch.float32)
        given = given._replace(
            left=900, keep_first=4, softcap=30.0, alibi_slopes=slopes, sinks=slopes
        )
    elif options == "mod":
        given = given._replace(mask_mod=even_keys)
    q = meta(B, T, H_q, D).transpose(1, 2)
    launch_decode(q, cache, None, None, given, splits=splits)


def launch_merging(D: int) -> None:
    """Merge two parts."""
    o, lse = (torch.empty(7, n, device="meta") for n in (D, 1))
    launch_merge(o.bfloat16(), lse[:, 0], o.bfloat16(), lse[:, 0])


def compilations_for_new_shapes() -> list[int]:
    """How many kernels each launch compiled: the first of its kind, then other sizes of each."""
    for kernel in (decode_kernel, combine_kernel):
        kernel.device_caches.clear()  # what other tests compiled in the same worker
    sizes = [{}, {"B": 1}, {"B": 16}, {"T": 2}, {"H_k": 1}, {"H_q": 2}, {"H_q": 32, "H_k": 16}]
    sizes += [{"splits": 2}, {"splits": 16}, {"table_width": 1}, {"table_width": 16}]
    lengths = {"contiguous": (1, 16, 4095), "paged": (128, 512), "ring": (16, 4095)}
    launches = [
        {"kind": kind, **size}
        for kind in lengths
        for size in [*sizes, *({"slots": n} for n in lengths[kind])]
    ]
    # Keys that are not split, and more than 16 rows in a K/V head, are kinds of their own.
    launches += [{"splits": 1}, {"splits": 1, "B": 16, "slots": 16}, {"T": 5}, {"T": 64, "B": 1}]
    return [count_compilations(lambda given=given: launch(D=32, **given)) for given in launches]


def compilations_of_few_queries() -> list[int]:
    """How many kernels launches without a cache compiled: keys in one order, in the other, more."""
    for kernel in (decode_kernel, combine_kernel):
        kernel.device_caches.clear()
    q = torch.empty(1, 8, 1, 48, dtype=torch.bfloat16, device="meta")

    def launch_with(*sizes: int, dims: tuple[int, int]) -> None:
        k = torch.empty(*sizes, dtype=torch.bfloat16, device="meta").transpose(*dims)
        launch_few_queries(q, k, k, Options(scale=0.1, causal=True))

    by_head, by_token = (1, 1), (1, 2)
    return [
        count_compilations(lambda: launch_with(1, 2, 4096, 48, dims=by_head)),
        count_compilations(lambda: launch_with(1, 4096, 2, 48, dims=by_token)),
        count_compilations(lambda: launch_with(1, 1000, 8, 48, dims=by_token)),
    ]


# target, kind of cache, head dim, dtype, codes, new tokens, options
CASES = gate_cases(
    [
        *(
            (target, "contiguous", 128, "bf16", None, 1, "plain")
            for target in ("sm_80", "sm_90", "gfx942")
        ),
        ("sm_90", "paged-3", 128, "bf16", "int8", 1, "scores"),
        ("sm_90", "paged", 128, "bf16", None, 1, "plain"),
        ("sm_90", "contiguous", 128, "bf16", "int8", 1, "plain"),
        ("sm_90", "paged-3", 64, "bf16", None, 16, "mod"),
        ("sm_90", "contiguous", 60, "bf16", None, 1, "plain"),
        ("sm_90", "sliced", 128, "bf16", None, 1, "plain"),
        ("sm_90", "paged-1", 59, "fp16", None, 1, "plain"),
    ],
    [
        ("sm_100", "contiguous", 128, "bf16", None, 1, "plain"),
        ("sm_90", "contiguous", 128, "bf16", None, 16, "plain"),
        ("sm_90", "contiguous", 128, "bf16", "fp8", 1, "plain"),
        *(("sm_90", kind, 128, "bf16", "int8", 1, "plain") for kind in ("paged", "paged-16")),
        ("sm_80", "contiguous", 128, "fp16", "fp8", 1, "plain"),
        ("sm_90", "contiguous", 40, "bf16", None, 1, "mod"),
        ("sm_90", "contiguous", 256, "fp32", None, 1, "plain"),
        *(
            (target, "contiguous", D, "bf16", None, 1, "plain")
            for target in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
            for D in (64, 256)
        ),
        *(
            (target, "paged-3", 128, "bf16", "int8", 1, "scores")
            for target in ("sm_80", "sm_86", "sm_100", "gfx942")
        ),
        *(
            (target, "contiguous", 128, "bf16", None, 16, "plain")
            for target in ("sm_80", "sm_86", "sm_100", "gfx942")
        ),
        *((target, "contiguous", 128, "bf16", None, 1, "plain") for target in ("sm_86", "sm_89")),
        ("gfx942", "paged-1", 59, "fp16", None, 1, "plain"),
        ("sm_90", "paged-1", 111, "bf16", None, 1, "plain"),
        ("sm_90", "ring", 64, "fp16", "int8", 1, "scores"),
        ("sm_80", "contiguous", 128, "fp32", None, 1, "plain"),
        ("sm_90", "contiguous", 128, "fp32", None, 1, "plain"),
        ("sm_90", "contiguous", 64, "fp32", None, 16, "plain"),
    ],
)


# Instructions of a thread, and bytes of shared memory, that a pair of a full block takes at most in
# a chunk of a prompt. A tile of 64 rows with eight warps would take twice as many.
CHUNKS = {
    ("sm_90", 64, "bf16"): 11.52,
    ("sm_90", 128, "bf16"): 21.76,
    ("sm_90", 256, "bf16"): 43.52,
    ("sm_90", 64, "fp32"): 307.2,
    ("sm_90", 128, "fp32"): 537.6,
    ("sm_80", 64, "bf16"): 23.04,
    ("sm_80", 128, "bf16"): 51.2,
    ("sm_80", 256, "bf16"): 128,
    ("sm_80", 64, "fp32"): 307.2,
    ("sm_86", 64, "bf16"): 65.28,
    ("sm_86", 128, "bf16"): 129.3,
    ("sm_86", 256, "bf16"): 307.2,
    ("sm_100", 64, "bf16"): 11.52,
    ("sm_100", 128, "bf16"): 21.76,
    ("gfx942", 128, "bf16"): 42.24,
}
OFTEN = [("sm_90", 128, "bf16")]
CHUNK_CASES = gate_cases(OFTEN, [case for case in CHUNKS if case not in OFTEN])


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool, submit_cases: Callable) -> dict[tuple, Future]:
    def submit(case: tuple) -> Future:
        target, kind, D, dtype, quantize, T, options = case
        kind, _, page = kind.partition("-")
        return compile_pool.submit(
            f"{__file__}:launch",
            target,
            kind=kind,
            D=D,
            dtype=dtype,
            quantize=quantize,
            T=T,
            options=options,
            slots=int(page) if page else 4096,
        )

    return submit_cases(submit, CASES)


def decode_facts(future: Future) -> CompiledFacts:
    decode, combine = future.result()
    assert (decode.name, combine.name) == ("decode_kernel", "combine_kernel")
    assert not combine.spills
    return decode


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    target, _, D, dtype, _, T, _ = case
    fact = decode_facts(compiled[case])
    allowed = SPILL_BYTES.get((target, D, dtype), USUAL_SPILL_BYTES)
    fine = fact.spill_store_bytes <= allowed or fact.spills_little
    assert fine, f"{fact.spill_store_bytes} bytes"
    assert fact.fits_shared_memory, f"{fact.shared_bytes} bytes of shared memory"
    assert fact.warnings == ()
    if dtype != "fp32":
        # 16 rows are too few for the matrix units of Hopper and Blackwell.
        many = MATRIX_OP.get(target, "mma.sync")
        assert fact.mma == {many if T > 1 or target == "gfx942" else "mma.sync"}


def test_pages_are_loaded_as_far_ahead_as_plain_keys(compiled: dict[tuple, Future]) -> None:
    """The load of the page number before them costs no buffer of keys and values."""
    plain, paged = (
        decode_facts(compiled["sm_90", kind, 128, "bf16", None, 1, "plain"])
        for kind in ("contiguous", "paged")
    )
    assert paged.shared_bytes >= plain.shared_bytes


def test_loads_are_as_wide_as_rows_allow(compiled: dict[tuple, Future]) -> None:
    """In rows of 260 or 120 bytes, a load of 16 bytes would start at a misaligned address."""
    for kind, D, dtype, width in (
        ("contiguous", 128, "bf16", "LDGSTS.E.BYPASS.128"),
        ("contiguous", 60, "bf16", "LDGSTS.E.64"),
        ("sliced", 128, "bf16", "LDGSTS.E"),
        ("paged-1", 59, "fp16", "LDG.E.U16"),
    ):
        loops = decode_facts(compiled["sm_90", kind, D, dtype, None, 1, "plain"]).loops
        widths = {name for loop in loops for name in loop.opcodes if name.startswith("LDG")}
        if kind == "paged-1":
            widths.discard("LDG.E")  # of page numbers
        assert widths - {"LDGDEPBAR"} == {width}


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_parts_are_merged_without_a_gap(target: str, compile_pool: CompilePool) -> None:
    """The kernel that merges may take its place before the other has ended, and waits for it.

    Nothing is loaded before it has waited: ACQBULK is griddepcontrol.wait, PREEXIT what lets it in.
    """
    decode, combine = compile_pool.facts(f"{__file__}:launch", target)
    assert (decode.name, combine.name) == ("decode_kernel", "combine_kernel")
    assert decode.code is not None and combine.code is not None
    (merging,), (ending,) = sass_of(combine.code), sass_of(decode.code)
    names = [instruction.base for instruction in merging]
    waits = [n for n, name in enumerate(names) if name == "ACQBULK"]
    lets_in = [n for n, instruction in enumerate(ending) if instruction.base == "PREEXIT"]
    assert (len(waits), len(lets_in)) == ((1, 1) if target == "sm_90" else (0, 0))
    if target == "sm_90":
        memory = [n for n, name in enumerate(names) if name.startswith(("LD", "ST", "RED", "ATOM"))]
        # What the host passed may be read before.
        assert waits[0] < min(n for n in memory if names[n] != "LDC")
        products = [n for n, instruction in enumerate(ending) if instruction.is_matrix_op]
        assert lets_in[0] > max(products), "it would take what the loops still need"


def test_full_blocks_are_not_masked(compiled: dict[tuple, Future]) -> None:
    fact = decode_facts(compiled["sm_90", "contiguous", 128, "bf16", None, 1, "plain"])
    full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
    assert full.count("FSEL") == 0
    assert boundary.count("FSEL") > 0


# What a block of 64 keys takes, a little above what was found. At 1.83 GHz an H200 reads a block
# of codes in 811 clocks, one of bf16 in 1560, and a multiprocessor issues four a clock.
MOST_INSTRUCTIONS = {
    ("contiguous", None): 240,
    ("paged", None): 275,
    ("contiguous", "int8"): 385,
    ("contiguous", "fp8"): 345,
    ("paged", "int8"): 430,
    # Triton 3.6 keeps fewer page numbers from one load to the next.
    ("paged-16", "int8"): 640 if RELEASE == "3.6" else 505,
}
OFTEN_COUNTED = (("contiguous", None), ("paged", None), ("contiguous", "int8"))
# Releases whose warps tell one another of two rows at once.
NEWER = RELEASE in ("3.8", "3.9")
if RELEASE == "3.8":
    MOST_INSTRUCTIONS |= {
        ("contiguous", "int8"): 388,
        ("contiguous", "fp8"): 365,
        ("paged", "int8"): 435,
        ("paged-16", "int8"): 512,
    }


@pytest.mark.parametrize(
    ("kind", "codes"),
    gate_cases(OFTEN_COUNTED, [case for case in MOST_INSTRUCTIONS if case not in OFTEN_COUNTED]),
)
def test_instructions_of_a_block(
    kind: str, codes: str | None, compiled: dict[tuple, Future]
) -> None:
    fact = decode_facts(compiled["sm_90", kind, 128, "bf16", codes, 1, "plain"])
    full = min(fact.loops, key=lambda loop: loop.total)
    assert full.total <= MOST_INSTRUCTIONS[kind, codes]
    # No value is read by the byte, none takes a conversion at a quarter of the rate.
    assert full.count("LDS.U8") == full.count("F2F") == full.count("I2F") == 0
    assert full.count("LDGSTS.E.BYPASS.128") > 0
    # Codes go from where they are loaded to the product, and are not put down again as numbers.
    # Triton 3.8 takes one of the two tiles of codes through shared memory a second time.
    again = 4 if RELEASE == "3.8" and codes else 0
    assert full.count("STS.128") == full.count("LDS.128") == again
    assert full.count("STS.64") == (1 if NEWER else 0)


@pytest.mark.parametrize("case", CHUNK_CASES, ids=lambda case: "-".join(map(str, case)))
def test_chunks_feed_the_matrix_units(
    case: tuple[str, int, str], compile_pool: CompilePool
) -> None:
    target, D, dtype = case
    given = {"D": D, "dtype": dtype, "T": 64}
    fact = decode_facts(compile_pool.submit(f"{__file__}:launch", target, **given))
    tile = tiles.tile_of(target, "decode_chunk", DTYPES[dtype].itemsize, D)
    full = min(fact.loops, key=lambda loop: loop.total)
    assert full.spills == 0
    found = full.of_pair(tile.BLOCK_M * tile.BLOCK_N, tile.num_warps)
    assert max(found) <= CHUNKS[case]


def test_stages_of_codes_are_half_of_those_of_numbers(compiled: dict[tuple, Future]) -> None:
    """Two programs have three blocks each on their way: 98 KB, where an H100 needs about 40."""
    plain, codes = (
        decode_facts(compiled["sm_90", "contiguous", 128, "bf16", kind, 1, "plain"])
        for kind in (None, "int8")
    )
    keys, buffers, tiles = 64, 3, 2
    block = keys * tiles * 128
    scales = keys * tiles * 4
    share = 0.63 if RELEASE == "3.8" else 0.6
    assert buffers * 2 * block <= plain.shared_bytes
    assert buffers * (block + scales) <= codes.shared_bytes <= share * plain.shared_bytes


@pytest.mark.parametrize("target", gate_cases(["sm_90"], ["sm_80", "gfx942"]))
def test_merging_compiles_without_spills(target: str, compile_pool: CompilePool) -> None:
    (fact,) = compile_pool.facts(f"{__file__}:launch_merging", target, D=128)
    assert fact.name == "merge_kernel"
    assert not fact.spills


def test_a_new_size_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_shapes", "sm_90")
    assert counts[-4:] == [1, 0, 1, 0]
    assert sum(counts[:-4]) == 3 + 1, "the kernel for each kind of cache, and the merge"
    assert counts[0] == 2


def test_few_queries_take_one_kernel_for_both_orders_of_keys(compile_pool: CompilePool) -> None:
    assert compile_pool.call(f"{__file__}:compilations_of_few_queries", "sm_90") == [2, 0, 0]
