"""Every shipped kernel compiles for every GPU: no spills, fits shared memory, on matrix units.

Nothing here runs on a GPU: the launchers themselves compile in worker processes.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
import triton
import triton.language as tl
from nightly import gate_cases

from fastattn.kernels.backward import (
    attention_backward_dq_kernel,
    launch_backward,
    launch_backward_one_pass,
)
from fastattn.kernels.backward_atomic import finish_dq_kernel, start_dq_kernel
from fastattn.kernels.backward_dkv import attention_backward_dkv_kernel
from fastattn.kernels.forward import attention_forward_kernel, launch_forward
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.key_extents import padding_extents_kernel
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import (
    RELEASE,
    TARGETS,
    USUAL_SPILL_BYTES,
    CompiledFacts,
    count_compilations,
)

SHIPPED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
MATRIX_OP = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
# wgmma and tcgen05 need tiles of 64 rows. With two accumulators of 256 columns, with 512 columns or
# with every mask and score at once those spill.
NARROW_BACKWARD = {("sm_100", 256)}
# Where dK and dV, of as many columns, come of a launch each.
APART = {("sm_90", 256), ("sm_90", 160)}
# fp32 rows of 256 columns have no matrix units and fit the registers in no tile: the smallest
# spills that were found.
SPILL_BYTES = {
    ("sm_90", "forward", 256, "fp32"): 16,
    ("sm_90", "backward", 256, "fp32"): 64,
    # Two accumulators of 512 columns.
    ("sm_90", "backward", 512, "bf16"): 32,
    # Every mask beside columns that exist in part, by Triton 3.6; in no loop.
    ("sm_90", "backward", 160, "bf16"): 160,
    ("sm_90", "backward", 256, "bf16"): 80,
    ("sm_90", "one-pass", 256, "bf16"): 80,
    # On an H100 20 percent faster than the best tile without; most by Triton 3.6; in no loop.
    ("sm_90", "backward", 64, "bf16"): 272,
    ("sm_90", "backward", 64, "fp16"): 272,
    ("sm_90", "backward", 128, "bf16"): 456,
    ("sm_100", "backward", 64, "bf16"): 80,
    # In no loop. Modelled: 0.35 clocks a pair; 0.45 with the best tile without.
    ("sm_100", "backward", 128, "bf16"): 640,
    # In no loop over full blocks but of capped scores. Modelled: 0.70 clocks a pair; 0.99 without.
    ("sm_80", "backward", 128, "bf16"): 160,
}
# With every mask and score at once: as many bytes, mostly of boundary blocks. Tiles that spill none
# take up to four times as long for the two or three at once that calls have.
HEAVY_SPILL_BYTES = {
    ("sm_80", "backward", 64): 96,
    ("sm_90", "forward", 128): 228,
    ("sm_90", "backward", 64): 656,
    ("sm_90", "backward", 128): 1244 if RELEASE == "3.9" else 1088,
    ("sm_90", "one-pass", 64): 432,
}
HEAVY_SPILLS = (0.033, 0.1)  # of the instructions of a full block and of a boundary block, at most
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def launch(
    kernel: str,
    D: int,
    dtype: str = "bf16",
    masks: str = "all",
    T: int = 1000,
    B: int = 2,
    H_k: int = 2,
) -> None:
    """Launch one kernel on meta tensors: masks as below, "causal" alone, or "full", none."""

    def meta(*shape: int, dtype: torch.dtype = DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    options = Options(right=0 if masks == "causal" else None, query_offset=0, scale=0.1)
    per_row = meta(B, dtype=torch.int32)
    if masks == "plain":  # all that the largest tiles serve
        options = Options(
            right=0,
            key_lengths=per_row,
            query_offsets=per_row,
            sinks=meta(4, dtype=torch.float32),
            scale=0.1,
        )
    if masks == "all":
        options = Options(
            meta(B, T, dtype=torch.bool),
            per_row,
            per_row,
            left=9,
            right=9,
            query_offset=0,
            scale=0.1,
        )
    if masks == "heavy":
        options = heavy(meta, B, T)
    q, k, v = meta(B, 4, T, D), meta(B, H_k, T, D), meta(B, H_k, T, D)
    if kernel == "forward":
        launch_forward(q, k, v, options)
    else:
        lse = meta(B, 4, T, dtype=torch.float32)
        function = launch_backward if kernel == "backward" else launch_backward_one_pass
        function(q, lse if masks == "all" else None, q, k, v, q, lse, options)


@triton.jit
def mask_mod(b, h, q_pos, k_pos, limits_ptr):
    return tl.load(limits_ptr + k_pos) <= q_pos


@triton.jit
def score_mod(x, b, h, q_pos, k_pos, limits_ptr):
    return 1.5 * x


@triton.jit
def score_mod_grad(dx, x, b, h, q_pos, k_pos, limits_ptr):
    return 1.5 * dx


def heavy(meta: Callable[..., torch.Tensor], B: int, T: int) -> Options:
    """Every mask and score at once, but relative keys."""
    documents, floats = meta(B, T, dtype=torch.int32), torch.float32
    return Options(
        prefix_lengths=meta(B, dtype=torch.int32), q_documents=documents, k_documents=documents,
        attn_mask=meta(B, 1, T, T, dtype=torch.bool), alibi_slopes=meta(4, dtype=floats),
        dropout_seed=meta(2, dtype=torch.int64), attn_bias=meta(1, 4, T, T),
        relative_bias=meta(4, 257, dtype=floats), sinks=meta(4, dtype=floats),
        mod_tensors=(meta(T, dtype=torch.int32),), left=9, causal=True, keep_first=4, stride=7,
        scale=0.1, softcap=30.0, dropout=0.1, mask_mod=mask_mod, score_mod=score_mod,
        score_mod_grad=score_mod_grad,
    )  # fmt: skip


def compilations_for_new_shapes() -> list[int]:
    """How many kernels each launch compiled: a first one, then other lengths, batches and heads.

    Cases below have the first ones too, so that the disk cache holds them; the process forgets.
    """
    for kernel in (
        attention_forward_kernel,
        attention_backward_dq_kernel,
        attention_backward_dkv_kernel,
        start_dq_kernel,
        finish_dq_kernel,
        padding_extents_kernel,
    ):
        kernel.device_caches.clear()
    launches.forget()

    def every(**sizes: int) -> None:
        for kernel in KERNELS:
            launch(kernel, 128, masks="causal", **sizes)
        launch("one-pass", 64, **sizes)

    shapes = [{}, {"T": 1}, {"T": 4095}, {"T": 16}, {"B": 1}, {"B": 33}, {"H_k": 4}, {"H_k": 1}]
    return [count_compilations(lambda sizes=sizes: every(**sizes)) for sizes in shapes]


KERNELS = ("forward", "backward")
# target, kernel, head dim, dtype, masks. sm_86 and sm_89 share a table, and so its rows.
CASES = gate_cases(
    [
        ("sm_80", "backward", 128, "bf16", "all"),
        ("sm_100", "forward", 128, "bf16", "all"),
        ("gfx942", "backward", 64, "bf16", "all"),
        *itertools.product(("sm_90",), KERNELS, (128,), ("bf16",), ("causal",)),
        ("sm_90", "forward", 128, "bf16", "full"),
        ("sm_90", "forward", 128, "bf16", "plain"),
        *itertools.product(("sm_90",), KERNELS, (64,), ("fp16",), ("causal",)),
        ("sm_90", "backward", 256, "bf16", "causal"),
        # A head dim that fills a tile in part.
        ("sm_90", "forward", 40, "bf16", "all"),
        *itertools.product(("sm_90",), KERNELS, (128,), ("bf16",), ("heavy",)),
        *itertools.product(("sm_80", "sm_90"), ("one-pass",), (64,), ("bf16",), ("all",)),
    ],
    [
        *itertools.product(("sm_90",), KERNELS, (128,), ("bf16",), ("all",)),
        *itertools.product(("sm_90",), KERNELS, (64,), ("bf16",), ("all",)),
        ("sm_90", "forward", 64, "bf16", "full"),
        ("sm_90", "one-pass", 256, "bf16", "causal"),
        ("sm_80", "forward", 128, "bf16", "all"),
        ("sm_100", "backward", 128, "bf16", "all"),
        ("gfx942", "forward", 64, "bf16", "all"),
        *itertools.product(("sm_86",), KERNELS, (256,), ("bf16",), ("all",)),
        ("sm_90", "backward", 40, "bf16", "all"),
        *itertools.product(("sm_80",), KERNELS, (64,), ("fp32",), ("all",)),
        *itertools.product(("sm_80",), KERNELS, (64, 256), ("bf16",), ("all",)),
        *itertools.product(("sm_90",), KERNELS, (160, 256), ("bf16",), ("all",)),
        *itertools.product(("sm_100",), KERNELS, (64,), ("bf16",), ("all",)),
        *itertools.product(("sm_89", "gfx942"), KERNELS, (128,), ("bf16",), ("all",)),
        *itertools.product(("sm_80", "sm_86"), KERNELS, (128,), ("bf16",), ("causal",)),
        *itertools.product(("sm_90",), KERNELS, (512,), ("bf16",), ("causal",)),
        ("sm_90", "forward", 64, "bf16", "plain"),
        *itertools.product(("sm_80", "sm_90", "gfx942"), KERNELS, (64,), ("bf16",), ("heavy",)),
        *itertools.product(("sm_90",), KERNELS, (64, 128), ("fp32",), ("all",)),
        *itertools.product(("sm_80", "gfx942"), KERNELS, (128,), ("fp32",), ("all",)),
        *itertools.product(("sm_89", "sm_100"), KERNELS, (64,), ("fp32",), ("causal",)),
        ("gfx942", "one-pass", 64, "bf16", "all"),
        ("sm_90", "one-pass", 128, "bf16", "all"),
        ("sm_90", "one-pass", 64, "bf16", "heavy"),
    ],
)
# Instructions of the loop over full blocks on sm_90 for the tiles in its table, one pass of a warp,
# by Triton 3.7, and by releases that take more. 3.9 runs another ptxas, which adds to each half of
# a matrix descriptor apart, and puts fences before products whose operands have not changed.
BUDGET = {
    ("attention_forward_kernel", 64): 278,
    ("attention_forward_kernel", 128): 341,
    ("attention_backward_dq_kernel", 64): 248,
    ("attention_backward_dq_kernel", 128): 290,
    ("attention_backward_dkv_kernel", 64): 324,
    ("attention_backward_dkv_kernel", 128): 260,
}
BUDGETS = {
    "3.6": {
        ("attention_backward_dkv_kernel", 64): 356,
        ("attention_backward_dkv_kernel", 128): 282,
    },
    "3.8": {
        ("attention_backward_dkv_kernel", 64): 339,
        ("attention_backward_dkv_kernel", 128): 274,
    },
    "3.9": {
        ("attention_forward_kernel", 64): 290,
        ("attention_forward_kernel", 128): 359,
        ("attention_backward_dq_kernel", 64): 272,
        ("attention_backward_dq_kernel", 128): 332,
        ("attention_backward_dkv_kernel", 64): 357,
        ("attention_backward_dkv_kernel", 128): 290,
    },
}


# Instructions of a boundary block for one of a full block: a limit a row, a comparison with it a
# score, a choice, and loads that ask which rows there are.
BOUNDARY = {
    "attention_forward_kernel": 1.33,
    "attention_backward_dq_kernel": 1.54 if RELEASE == "3.8" else 1.5,
    "attention_backward_dkv_kernel": 1.73 if RELEASE == "3.6" else 1.4,
}


def budget(fact: CompiledFacts, D: int) -> int:
    return (BUDGET | BUDGETS.get(RELEASE, {}))[fact.name, D]


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool, submit_cases: Callable) -> dict[tuple, Future]:
    def submit(case: tuple) -> Future:
        target, kernel, D, dtype, masks = case
        return compile_pool.submit(
            f"{__file__}:launch", target, kernel=kernel, D=D, dtype=dtype, masks=masks
        )

    return submit_cases(submit, CASES)


def attention_kernels(facts: list[CompiledFacts]) -> list[CompiledFacts]:
    return [f for f in facts if f.name.startswith("attention_")]


def passes_over_dq(facts: list[CompiledFacts]) -> list[CompiledFacts]:
    return [f for f in facts if f.name in ("start_dq_kernel", "finish_dq_kernel")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    target, kernel, D, dtype, masks = case
    facts = attention_kernels(compiled[case].result())
    launches = {"forward": 1, "backward": 2, "one-pass": 1}[kernel]
    assert len(facts) == launches + (kernel != "forward" and (target, D) in APART)
    simple = passes_over_dq(compiled[case].result())
    assert len(simple) == (2 if kernel == "one-pass" else 0)
    assert all(fact.fits_shared_memory and not fact.spills for fact in simple)
    for fact in facts:
        allowed = SPILL_BYTES.get((target, kernel, D, dtype), USUAL_SPILL_BYTES)
        if masks == "heavy":
            allowed = HEAVY_SPILL_BYTES.get((target, kernel, D), USUAL_SPILL_BYTES)
        fine = fact.spill_store_bytes <= allowed or fact.spills_little
        assert fine, f"{fact.name}: {fact.spill_store_bytes} bytes"
        if masks == "heavy" and target != "gfx942":
            for loop, share in zip(fact.loops, HEAVY_SPILLS, strict=True):
                assert loop.spills <= share * loop.total, fact.name
        elif dtype != "fp32":
            assert not fact.spills_in_loops or target == "gfx942", fact.name
        assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"
        assert fact.warnings == ()
        if dtype != "fp32":
            narrow = kernel == "backward" and (target, D) in NARROW_BACKWARD
            narrow = narrow or masks == "heavy" or D == 512
            assert fact.mma & {MATRIX_OP.get(target, "mma.sync"), "mma.sync" if narrow else ""}


def test_weights_stay_in_registers_on_hopper(compiled: dict[tuple, Future]) -> None:
    """P is the register operand of P V: it makes no way through shared memory."""
    (fact,) = attention_kernels(compiled["sm_90", "forward", 128, "bf16", "causal"].result())
    assert fact.wgmma_register_a > 0


@pytest.mark.parametrize(
    ("target", "instruction", "apart"), [("sm_80", "RED.E.ADD.F32", 1), ("sm_90", "F32x4", 4)]
)
def test_atomics_take_as_many_columns_as_they_can(
    target: str, instruction: str, apart: int, compiled: dict[tuple, Future]
) -> None:
    """Each element of a dQ tile is added once, in wide atomics; none in a compare-and-swap loop."""
    (fact,) = attention_kernels(compiled[target, "one-pass", 64, "bf16", "all"].result())
    tile = tiles.tile_of(target, "backward_one_pass", 2, 64)
    of_thread = tile.BLOCK_M * 64 // (32 * tile.num_warps)
    for loop in fact.loops:
        atomics = {name: n for name, n in loop.opcodes.items() if name.startswith(("RED", "ATOM"))}
        assert all(instruction in name for name in atomics), atomics
        assert sum(atomics.values()) == of_thread // apart


def test_full_blocks_are_not_masked(compiled: dict[tuple, Future]) -> None:
    """One loop runs over full blocks, without compares; the other masks the boundary blocks."""
    (fact,) = attention_kernels(compiled["sm_90", "forward", 128, "bf16", "causal"].result())
    full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
    tile = tiles.tile_of("sm_90", "forward", 2, 128)
    scores = tile.BLOCK_M * tile.BLOCK_N // (32 * tile.num_warps)  # a thread
    assert full.count("MUFU.EX2") == boundary.count("MUFU.EX2") >= scores
    assert full.count("FSEL") == 0
    assert boundary.count("FSEL") >= scores


@pytest.mark.parametrize(("D", "dtype"), [(64, "fp16"), (128, "bf16")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_full_blocks_take_few_instructions(
    kernel: str, D: int, dtype: str, compiled: dict[tuple, Future]
) -> None:
    """Instructions beside the matrix products must fit into the time of the products."""
    for fact in attention_kernels(compiled["sm_90", kernel, D, dtype, "causal"].result()):
        full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
        assert full.total <= budget(fact, D), f"{fact.name}: {full.total} instructions"
        assert boundary.total <= BOUNDARY[fact.name] * full.total, (fact.name, boundary.total)


@pytest.mark.parametrize("D", gate_cases([128], [64]))
def test_forward_reaches_its_targets(D: int, compiled: dict[tuple, Future]) -> None:
    """128 queries by 64 keys without a mask, the fastest tile on an H100."""
    (fact,) = attention_kernels(compiled["sm_90", "forward", D, "bf16", "full"].result())
    full, _ = sorted(fact.loops, key=lambda loop: loop.total)
    tile = tiles.tile_of("sm_90", "forward", 2, D)
    assert (tile.BLOCK_M, tile.BLOCK_N) == (128, 64)
    assert full.total <= budget(fact, D)
    # No thread asks another for its sum: what is left are two steps of two maxima.
    assert full.count("SHFL") == 4


def test_shipped_targets_are_known_to_the_lab() -> None:
    assert set(SHIPPED) <= set(TARGETS)


def test_a_new_length_batch_or_head_count_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_shapes", "sm_90")
    # Of one key, dK and dV are split over the heads of a group: what adds them up comes once.
    assert counts == [7, 1, 0, 0, 0, 0, 0, 0]
