"""Rows of the tables, most of GPUs on which nothing has run: what the compilers make of the loop
over full blocks. On sm_89 and sm_120 the rows of sm_86 are held to the same.
"""

import inspect
import itertools
import re
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from nightly import gate_cases

from fastattn.kernels.backward import launch_backward, launch_backward_one_pass
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.sass import Loop

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
UNITS = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_89": "mma.sync",
    "sm_90": "wgmma",
    "sm_120": "mma.sync",
    "sm_100": "tcgen05",
    "gfx942": "mfma",
}
# Bytes of shared memory for a pair, at most, where it feeds the units slower than they multiply.
FED = {
    ("sm_80", "attention_backward_dq_kernel", 128, "causal"): 64,
    ("sm_80", "attention_backward_dkv_kernel", 128, "causal"): 90,
}
MASKS = {"causal": Options(right=0, scale=0.1), "window": Options(left=99, right=0, scale=0.1)}
B, H, T = 1, 2, 512
GATE = [("sm_100", 128, "causal")]
# Masks leave mma.sync too few registers for 256 columns: some warps compute the same there.
NARROW = [(target, 256, "window") for target, unit in UNITS.items() if unit == "mma.sync"]
EVERY = itertools.product(UNITS, (64, 128, 256), MASKS)
CASES = gate_cases(GATE, [case for case in EVERY if case not in GATE + NARROW])
# fp32: no matrix unit serves it, and shared memory, from which FFMA has its operands, is what it
# waits for: bytes for a pair, and instructions of a thread, at most.
FFMA = {
    ("forward", 64): 346,
    ("backward_dq", 64): 538,
    ("backward_dkv", 64): 602,
    ("backward_one_pass", 64): 820,
    ("forward", 128): 538,
    ("forward_heavy", 64): 346,
    ("backward_dq_heavy", 64): 538,
    ("backward_dkv_heavy", 64): 807,
    ("backward_one_pass_heavy", 64): 1024,
    ("forward_heavy", 128): 743,
    ("backward_dq_heavy", 128): 1331,
    ("backward_dkv_heavy", 128): 2099,
    ("backward_one_pass_heavy", 128): 2528,
}
# Of 64 rows Triton 3.7 makes some products ones of tensor memory, of TF32, that were said to be
# IEEE: all tiles have fewer.
FFMA_OF_32_ROWS = {
    ("forward", 64): 352,
    ("backward_dq", 64): 538,
    ("backward_dkv", 64): 679,
    ("backward_one_pass", 64): 820,
    ("forward", 128): 820,
    ("forward_heavy", 64): 352,
    ("backward_dq_heavy", 64): 538,
    ("backward_dkv_heavy", 64): 807,
    ("forward_heavy", 128): 820,
}
FP32 = {target: FFMA for target, unit in UNITS.items() if unit == "mma.sync"}
FP32["sm_90"] = FFMA | {("backward_dkv", 128): 1460}
FP32["sm_100"] = FFMA_OF_32_ROWS
# Instructions of a full block that move spilled registers, of 2650: no other tile has fewer.
FP32_SPILLS = {("sm_120", "backward_one_pass", 64): 2}
FP32_EVERY = [(target, *row) for target, rows in FP32.items() for row in rows]
FP32_GATE = [("sm_86", "forward", 64)]
FP32_CASES = gate_cases(FP32_GATE, [case for case in FP32_EVERY if case not in FP32_GATE])


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


def multiply_adds(loop: Loop, warps: int) -> float:
    """Products of 16-bit numbers in a pass of a loop by all warps of a program.

    "HGMMA.64x128x16" is done by four warps together, "UTCHMMA.128x64x16" by one warp for all.
    """
    found = 0.0
    for opcode, number in loop.opcodes.items():
        if shape := re.search(r"(\d+)x(\d+)x(\d+)", opcode.replace("16816", "16x8x16")):
            M, N, K = map(int, shape.groups())
            # Products of 64 rows keep tensor memory's unit as long as those of 128.
            M = 128 if opcode.startswith("UTCHMMA") else M
            together = {"HGMMA": 4, "UTCHMMA": warps}.get(opcode.split(".")[0], 1)
            found += number * M * N * K * warps / together
    return found


def kernels(facts: list[CompiledFacts]) -> list[CompiledFacts]:
    return [fact for fact in facts if fact.name in KERNELS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loops_multiply_once_and_do_not_spill(
    case: tuple[str, int, str], compiled: dict[tuple, Future]
) -> None:
    target, D, masks = case
    calls = "_masked" if masks == "window" else ""
    unit = UNITS[target]
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
        pairs = tile.BLOCK_M * tile.BLOCK_N
        products += multiply_adds(full, tile.num_warps) / pairs / D
        moved = full.of_pair(pairs, tile.num_warps).shared_bytes
        assert moved <= FED.get((target, fact.name, D, masks), moved)
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
    assert max(full.of_pair(tile.BLOCK_M * tile.BLOCK_N, tile.num_warps)) <= FP32[target][kernel, D]


def test_fp32_tiles_of_sm_100_are_too_small_for_tensor_memory() -> None:
    rows = [row for row in tiles.table("sm_100") if row["element_size"] == 4]
    assert rows and all(max(row["BLOCK_M"], row["BLOCK_N"]) < 64 for row in rows)
