"""What ptxas makes of the Hopper kernels: no spills, operands in registers, softmax under products.

The launchers compile in worker processes; nothing runs.
"""

import itertools
from concurrent.futures import Future

import pytest
import torch

from fastattn.kernels.hopper.config import HEAD_DIMS, forward_config
from fastattn.kernels.hopper.forward import launch_hopper_forward
from fastattn.testing.compile_pool import CompilePool
from fastattn.testing.cross_compile import CompiledFacts, count_compilations
from fastattn.testing.sass import Loop, exponentials_under_wgmma, read_sass

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Sides of the band, and whether rows have lengths of their own.
MASKS = {"full": (None, None, False), "causal": (None, 0, False), "all": (9, 9, True)}
FORWARD = [
    *itertools.product(HEAD_DIMS, ("bf16",), ("causal",)),
    (64, "fp16", "full"),
    (128, "bf16", "all"),
    (256, "bf16", "all"),
]
# With a band and lengths some of a tile's scalars go to the stack: bytes a thread, none in a loop.
SPILL_BYTES = {"full": 0, "causal": 0, "all": 16}
# Instructions of the loop over full blocks, and of the one over masked blocks.
FORWARD_BUDGET = {64: (500, 1000), 128: (540, 1010), 256: (465, 800)}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_forward(D: int, dtype: str = "bf16", mask: str = "causal", T: int = 1000) -> None:
    left, right, lengths = MASKS[mask]
    q, k = meta(2, 4, T, D, dtype=DTYPES[dtype]), meta(2, 2, T, D, dtype=DTYPES[dtype])
    launch_hopper_forward(
        q, k, k, left=left, right=right, query_offset=0, scale=0.1,
        key_lengths=meta(2, dtype=torch.int32) if lengths else None,
    )  # fmt: skip


def compilations_for_new_lengths() -> list[int]:
    return [count_compilations(lambda T=T: launch_forward(64, T=T)) for T in (1000, 1, 4096, 77)]


@pytest.fixture(scope="module")
def forward(compile_pool: CompilePool) -> dict[tuple, Future]:
    """All cases, submitted at once so that every worker has something to do."""
    return {
        case: compile_pool.submit(
            f"{__file__}:launch_forward", "sm_90", D=case[0], dtype=case[1], mask=case[2]
        )
        for case in FORWARD
    }


def only(facts: list[CompiledFacts]) -> CompiledFacts:
    (fact,) = facts
    return fact


def in_loops(loops: tuple[Loop, ...], *names: str) -> int:
    return sum(loop.count(*names) for loop in loops)


def check_resources(fact: CompiledFacts, spill_bytes: int) -> None:
    spilled = max(fact.spill_store_bytes, fact.spill_load_bytes)
    assert fact.spill_store_bytes <= spill_bytes, f"{fact.name}: {spilled} bytes"
    assert in_loops(fact.loops, "LDL", "STL") == 0, f"{fact.name} spills inside of a loop"
    assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"
    assert fact.warnings == (), fact.name
    assert fact.mma == {"wgmma"}


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: "-".join(map(str, case)))
def test_forward_compiles_well(case: tuple, forward: dict[tuple, Future]) -> None:
    D, _, mask = case
    fact = only(forward[case].result())
    config = forward_config(D, MASKS[mask][2])
    check_resources(fact, SPILL_BYTES[mask])
    assert fact.wgmma_register_a > 0, "the weights go through shared memory"

    loops = sorted(fact.loops, key=lambda loop: loop.total)
    full, masked = loops[: config.CONSUMERS], loops[config.CONSUMERS :]
    assert len(full) == len(masked) == config.CONSUMERS
    scores = 64 * config.BLOCK // 128  # a thread
    for loop in loops:
        assert loop.count("MUFU.EX2") >= scores
        assert loop.overlap is not None and loop.overlap >= 0.9, f"{fact.name}: {loop.overlap}"
    for loop in full:
        assert loop.count("FSEL", "ISETP") == 0, "the loop over full blocks masks"
        assert loop.total <= FORWARD_BUDGET[D][0], f"{fact.name}: {loop.total} instructions"
    for loop in masked:
        assert loop.count("FSEL") >= scores
        assert loop.total <= FORWARD_BUDGET[D][1], f"{fact.name}: {loop.total} instructions"


def test_a_new_length_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_lengths", "sm_90")
    assert counts == [1, 0, 0, 0]


SASS = """
        /*0000*/                   MUFU.EX2 R0, R1 ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8], R88, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MUFU.EX2 R0, R1 ;
        /*0060*/                   MUFU.RCP R0, R1 ;
        /*0070*/              @!P0 MUFU.EX2 R0, R1 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   MUFU.EX2 R0, R1 ;
"""


def test_overlap_counts_exponentials_between_issue_and_wait() -> None:
    (body,) = read_sass(SASS)
    assert exponentials_under_wgmma(body) == 0.5
    assert exponentials_under_wgmma([i for i in body if "DEPBAR" not in i.opcode]) == 1.0
    assert exponentials_under_wgmma([i for i in body if "MUFU" not in i.opcode]) is None
