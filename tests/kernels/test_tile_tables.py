"""Rows of the tables of GPUs on which nothing has run: what the compilers make of the loop over
full blocks. On sm_89 and sm_120 the rows of sm_86 are held to the same.
"""

import inspect
import itertools
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from fastattn.kernels.backward import launch_backward, launch_backward_one_pass
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool, compiled_cases
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.speed import loop_clocks, programs_at_once

KERNELS = {
    "attention_forward_kernel": "forward",
    "attention_backward_dq_kernel": "backward_dq",
    "attention_backward_dkv_kernel": "backward_dkv",
}
ONE_PASS = "attention_backward_dkv_kernel"
# Products of each kernel with the head dim; with dK and dV apart both compute the scores.
PRODUCTS = {
    "attention_forward_kernel": 2,
    "attention_backward_dq_kernel": 3,
    "attention_backward_dkv_kernel": 4,
}
# Multiply-adds a clock of the units that have to do them: see `speed`.
UNITS = {
    "sm_80": ("mma.sync", 1024),
    "sm_86": ("mma.sync", 256),
    "sm_89": ("mma.sync", 256),
    "sm_120": ("mma.sync", 256),
    "sm_100": ("tcgen05", 4096),
    "gfx942": ("mfma", 1024),
}
# Clocks a pair of shared memory, at most, where it feeds the units slower than they multiply.
FED = {
    ("sm_80", "attention_backward_dq_kernel", 128, "causal"): 0.5,
    ("sm_80", "attention_backward_dkv_kernel", 128, "causal"): 0.7,
}
MASKS = {"causal": Options(right=0, scale=0.1), "window": Options(left=99, right=0, scale=0.1)}
B, H, T = 1, 2, 512
GATE = [("sm_100", 128, "causal"), ("gfx942", 128, "causal"), ("sm_120", 128, "causal")]
# Masks leave mma.sync too few registers for 256 columns: some warps compute the same there.
NARROW = [(target, 256, "window") for target, (unit, _) in UNITS.items() if unit == "mma.sync"]
EVERY = itertools.product(UNITS, (64, 128, 256), MASKS)
CASES = compiled_cases(GATE, [case for case in EVERY if case not in GATE + NARROW])
# fp32: no matrix unit serves it, and shared memory, from which FFMA has its operands, is what it
# waits for: clocks a pair, at most.
FFMA = {
    ("forward", 64): 2.7,
    ("backward_dq", 64): 4.2,
    ("backward_dkv", 64): 4.7,
    ("backward_one_pass", 64): 6.4,
    ("forward", 128): 4.2,
    ("forward_heavy", 64): 2.7,
    ("backward_dq_heavy", 64): 4.2,
    ("backward_dkv_heavy", 64): 6.3,
    ("backward_one_pass_heavy", 64): 8.0,
    ("forward_heavy", 128): 5.8,
    ("backward_dq_heavy", 128): 10.4,
    ("backward_dkv_heavy", 128): 16.4,
    ("backward_one_pass_heavy", 128): 19.75,
}
# Of 64 rows Triton 3.7 makes some products ones of tensor memory, of TF32, that were said to be
# IEEE: all tiles have fewer.
FFMA_OF_32_ROWS = {
    ("forward", 64): 2.75,
    ("backward_dq", 64): 4.2,
    ("backward_dkv", 64): 5.3,
    ("backward_one_pass", 64): 6.4,
    ("forward", 128): 6.4,
    ("forward_heavy", 64): 2.75,
    ("backward_dq_heavy", 64): 4.2,
    ("backward_dkv_heavy", 64): 6.3,
    ("forward_heavy", 128): 6.4,
}
FP32 = {target: FFMA for target, (unit, _) in UNITS.items() if unit == "mma.sync"}
FP32["sm_90"] = FFMA | {("backward_dkv", 128): 11.4}
FP32["sm_100"] = FFMA_OF_32_ROWS
# Instructions of a full block that move spilled registers, of 2650: no other tile has fewer.
FP32_SPILLS = {("sm_120", "backward_one_pass", 64): 2}
FP32_EVERY = [(target, *row) for target, rows in FP32.items() for row in rows]
FP32_GATE = [("sm_86", "forward", 64)]
FP32_CASES = compiled_cases(FP32_GATE, [case for case in FP32_EVERY if case not in FP32_GATE])


def launch(D: int, masks: str) -> None:
    q = torch.empty(B, H, T, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(B, H, T, device="meta")
    launch_forward(q, q, q, MASKS[masks])
    launch_backward(q, None, q, q, q, q, lse, MASKS[masks])


def launch_fp32(kernel: str, D: int) -> None:
    q, lse = torch.empty(B, H, T, D, device="meta"), torch.empty(B, H, T, device="meta")
    options = MASKS["causal"]
    if kernel.endswith("_heavy"):
        mask = torch.empty(B, 1, T, T, dtype=torch.bool, device="meta")
        options = Options(attn_mask=mask, scale=0.1)
    if kernel.startswith("forward"):
        launch_forward(q, q, q, options)
    else:
        one_pass = kernel.startswith("backward_one_pass")
        function = launch_backward_one_pass if one_pass else launch_backward
        function(q, None, q, q, q, q, lse, options)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool, submit_cases: Callable) -> dict[tuple, Future]:
    def submit(case: tuple) -> Future:
        target, *given = case
        function = launch if case in CASES else launch_fp32
        arguments = dict(zip(inspect.signature(function).parameters, given, strict=True))
        return compile_pool.submit(f"{__file__}:{function.__name__}", target, **arguments)

    return submit_cases(submit, [*CASES, *FP32_CASES])


def kernels(facts: list[CompiledFacts]) -> list[CompiledFacts]:
    return [fact for fact in facts if fact.name in KERNELS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loops_multiply_once_and_do_not_spill(
    case: tuple[str, int, str], compiled: dict[tuple, Future]
) -> None:
    target, D, masks = case
    calls = "_masked" if masks == "window" else ""
    unit, rate = UNITS[target]
    products = 0.0
    for fact in kernels(compiled[case].result()):
        tile = tiles.tile_of(target, KERNELS[fact.name] + calls, 2, D)
        assert fact.fits_shared_memory
        assert fact.mma == {unit}
        assert [loop.spills for loop in fact.loops] == [0] * len(fact.loops), fact.name
        full = min(fact.loops, key=lambda loop: loop.total)
        # Rows with a window may have no registers for more than one stage.
        if unit != "mfma" and (tile.num_stages > 1 or masks == "causal"):
            assert full.count("LDG") == 0, f"{fact.name} waits for its loads"
        clocks = loop_clocks(full, target, tile.num_warps) / (tile.BLOCK_M * tile.BLOCK_N)
        products += clocks.tensor * rate / D
        assert clocks.shared <= FED.get((target, fact.name, D, masks), clocks.shared)
    apart = tiles.tile_of(target, "backward_dkv" + calls, 2, D).apart
    assert products == sum(PRODUCTS.values()) + apart


@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: "-".join(map(str, case)))
def test_loops_of_fp32_use_what_they_load(
    case: tuple[str, str, int], compiled: dict[tuple, Future]
) -> None:
    """Tiles of many results a thread load an operand for more products, and few enough not to
    spill.
    """
    target, kernel, D = case
    names = {kind: name for name, kind in KERNELS.items()}
    name = names.get(kernel.removesuffix("_heavy"), ONE_PASS)
    (fact,) = [fact for fact in compiled[case].result() if fact.name == name]
    tile = tiles.tile_of(target, kernel, 4, D)
    assert not fact.mma, "TF32"
    full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
    assert full.spills <= FP32_SPILLS.get(case, 0)
    assert 100 * boundary.spills <= boundary.total * kernel.endswith("_heavy")
    clocks = loop_clocks(full, target, tile.num_warps, programs=programs_at_once(fact))
    assert (clocks / (tile.BLOCK_M * tile.BLOCK_N)).bound <= FP32[target][kernel, D]


def test_fp32_tiles_of_sm_100_are_too_small_for_tensor_memory() -> None:
    rows = [row for row in tiles.table("sm_100") if row["element_size"] == 4]
    assert rows and all(max(row["BLOCK_M"], row["BLOCK_N"]) < 64 for row in rows)
