"""Rows of the tables of GPUs on which nothing has run: what the compilers make of the loop over
full blocks. On sm_89 and sm_120 the rows of sm_86 are held to the same.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool, compiled_cases
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.speed import loop_clocks

KERNELS = {
    "attention_forward_kernel": "forward",
    "attention_backward_dq_kernel": "backward_dq",
    "attention_backward_dkv_kernel": "backward_dkv",
}
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
MASKS = {"causal": Options(right=0, scale=0.1), "window": Options(left=99, right=0, scale=0.1)}
B, H, T = 1, 2, 512
GATE = [("sm_100", 128, "causal"), ("gfx942", 128, "causal"), ("sm_120", 128, "causal")]
# Masks leave mma.sync too few registers for 256 columns: some warps compute the same there.
NARROW = [(target, 256, "window") for target, (unit, _) in UNITS.items() if unit == "mma.sync"]
EVERY = itertools.product(UNITS, (64, 128, 256), MASKS)
CASES = compiled_cases(GATE, [case for case in EVERY if case not in GATE + NARROW])


def launch(D: int, masks: str) -> None:
    q = torch.empty(B, H, T, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(B, H, T, device="meta")
    launch_forward(q, q, q, MASKS[masks])
    launch_backward(q, None, q, q, q, q, lse, MASKS[masks])


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool, submit_cases: Callable) -> dict[tuple, Future]:
    def submit(case: tuple[str, int, str]) -> Future:
        target, D, masks = case
        return compile_pool.submit(f"{__file__}:launch", target, D=D, masks=masks)

    return submit_cases(submit, CASES)


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
    apart = tiles.tile_of(target, "backward_dkv" + calls, 2, D).apart
    assert products == sum(PRODUCTS.values()) + apart
