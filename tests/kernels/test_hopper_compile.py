"""Compiled Hopper kernels: no spills, operands in registers, softmax under products.

The launchers compile in worker processes; nothing runs.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from unittest import mock

import pytest
import torch
from nightly import gate_cases

from fastattn.kernels.hopper import forward
from fastattn.kernels.hopper.backward import launch_hopper_backward
from fastattn.kernels.hopper.host import end_early
from fastattn.kernels.hopper.tile_table import HopperConfig, backward_config, forward_config
from fastattn.kernels.launch import launches, tiles
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import RELEASE, CompiledFacts, count_compilations
from fastattn.testing.compiling.sass import Loop, exponentials_under_wgmma, read_sass

CONSUMERS = 2
# "all": every option that changes the code of a loop or adds to what a tile keeps, packed sequences
# with lengths among them.
# "turns": "causal" with consumers that take turns.
# "part": of a sequence that is spread over GPUs, with positions of its own and results in fp32.
FORWARD = gate_cases(
    [(128, "causal"), (128, "all")],
    [(64, "causal"), (256, "causal"), (128, "turns"), *((D, "part") for D in (64, 128, 256))],
)
BACKWARD = gate_cases(
    [(128, "causal")], [(64, "causal"), (64, "part"), (128, "part"), (128, "all")]
)
# Three kernels: dQ, dV and dK.
WIDEST = gate_cases([], [(256, case) for case in ("causal", "all", "packed", "part")])
# "packed": "all" without a softcap. Of both there are so many tiles that they are put in order.
# "threads": "causal" with threads that add to dQ, in place of TMA; "threads-4": in four stages.
ONE_PASS = gate_cases(
    [(128, "causal"), (128, "threads")],
    [(128, "packed"), (128, "part"), (64, "threads"), (128, "threads-4")],
)
# What a tile needs before and after its loops may go to the stack: bytes a thread. Nothing does in
# the loops over full blocks. Triton 3.9, with another ptxas, keeps more there, and its loops take
# more instructions: it adds to each half of a matrix descriptor apart.
NEWER = RELEASE == "3.9"
SPILL_BYTES = {"forward": 212 if NEWER else 80, "backward": 128, "widest": 256, "one_pass": 400}
THREADS_SPILL_BYTES = 48
# Addresses of a table of blocks, of positions and of the rows that registers are stored to.
PART_SPILL_BYTES = {
    "forward": 504 if NEWER else 212,
    "backward": 448,
    "widest": 320,
    "one_pass": 256,
}
# A full block reads back this many of them.
PART_LOADS = {"hopper_backward_dq_kernel": 2}
# Instructions of the loop over full blocks. Those of "causal" leave no room for an option that is
# off: they are what the loops took before there were others.
BUDGET = {
    ("hopper_forward_kernel", "causal"): {64: 433, 128: 475, 256: 431},
    ("hopper_forward_kernel", "turns"): {128: 489},
    ("hopper_forward_kernel", "part"): {64: 434, 128: 477, 256: 431},
    ("hopper_forward_kernel", "all"): {128: 1000},
    ("hopper_backward_dq_kernel", "causal"): {64: 375, 128: 418},
    ("hopper_backward_dq_kernel", "part"): {64: 375, 128: 418},
    ("hopper_backward_dq_kernel", "all"): {128: 590},
    ("hopper_backward_dkv_kernel", "causal"): {64: 304, 128: 354},
    ("hopper_backward_dkv_kernel", "part"): {64: 304, 128: 354},
    ("hopper_backward_dkv_kernel", "all"): {128: 430},
}
WIDEST_BUDGET = {
    "causal": (335, 240, 385),
    "part": (335, 240, 385),
    "packed": (335, 240, 385),
    "all": (405, 430, 440),
}
# And of that over masked blocks, of "causal": a comparison and a choice a score, and little else.
MASKED_BUDGET = {
    "hopper_forward_kernel": {64: 573, 128: 618, 256: 513},
    "hopper_backward_dq_kernel": {64: 510, 128: 550},
    "hopper_backward_dkv_kernel": {64: 385, 128: 440},
}
ONE_PASS_MASKED_BUDGET = {"3.6": 560, "3.9": 575}.get(RELEASE, 550)
ONE_PASS_BUDGET = {
    (128, "causal"): 482,
    (128, "packed"): 560,
    (128, "part"): 482,
    (128, "threads"): 493 if RELEASE == "3.9" else 470,
    (64, "threads"): 420,
    (128, "threads-4"): 475,
}
# Bytes of shared memory that the threads move for a pair, by head dim: a number of dQ goes there
# once, to its tile or to the sums.
ONE_PASS_BYTES = {64: 26, 128: 42}
if NEWER:
    BUDGET["hopper_forward_kernel", "causal"][128] = 486
    BUDGET["hopper_forward_kernel", "part"][128] = 482
    BUDGET["hopper_backward_dq_kernel", "causal"][64] = 384
    BUDGET["hopper_backward_dq_kernel", "part"][128] = 437
    BUDGET["hopper_backward_dkv_kernel", "part"][128] = 407
    WIDEST_BUDGET["causal"] = (397, 295, 451)
    ONE_PASS_BUDGET[128, "causal"] = 491
elif RELEASE == "3.6":
    BUDGET["hopper_forward_kernel", "causal"][256] = 433
    BUDGET["hopper_forward_kernel", "part"][128] = 480
elif RELEASE == "3.8":
    WIDEST_BUDGET["causal"] = (335, 240, 388)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


MANY = 40000
TABLES = {
    "part": ["block_sparsity_kernel"],
    "all": ["packed_costs_kernel", "packed_order_kernel"],
    "packed": ["packed_costs_kernel", "packed_order_kernel"],
}


def options_of(case: str) -> Options:
    if case == "part":
        positions = meta(1, 1000, dtype=torch.int32)
        return Options(
            right=0, scale=0.1, q_positions=positions, k_positions=positions, fp32_results=True
        )
    if case not in ("all", "packed"):
        return Options(right=0, scale=0.1)
    offsets = meta(4, dtype=torch.int32)
    return Options(
        left=9,
        right=9,
        key_lengths=meta(3, dtype=torch.int32),
        scale=0.1,
        query_offset=None,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        softcap=5.0 if case == "all" else None,
        sinks=meta(4, dtype=torch.float32),
    )


def one_pass_config(D: int, case: str) -> HopperConfig:
    config = backward_config("one_pass", D, False, False)
    if case.startswith("threads"):
        config = config._replace(DQ_BY_TMA=False, STAGES=4 if case == "threads-4" else 2)
    return config


def launch(kernel: str, D: int, case: str, T: int = 1000) -> None:
    options = options_of(case)
    T = T if options.cu_seqlens_q is None else MANY
    q, k = meta(1, 4, T, D), meta(1, 2, T, D)
    if kernel == "forward":
        config = forward_config(D, end_early(options))._replace(PING_PONG=case == "turns")
        with mock.patch.object(forward, "forward_config", lambda *_: config):
            launches.forget()
            forward.launch_hopper_forward(q, k, k, options)
    else:
        lse = meta(1, 4, T, dtype=torch.float32)
        options = options._replace(atomic_dq=kernel == "one_pass")
        forced = {}
        if case.startswith("threads"):
            forced["hopper_one_pass"] = one_pass_config(D, case)
        with tiles.forced(**forced):
            launch_hopper_backward(q, lse, q, k, k, q, lse, options)


def compilations_for_new_lengths() -> list[int]:
    def every(T: int) -> None:  # the first length is that of the cases below
        for kernel in ("forward", "backward", "one_pass"):
            launch(kernel, 128, "causal", T)

    return [count_compilations(lambda T=T: every(T)) for T in (1000, 1, 4096, 77)]


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool, submit_cases: Callable) -> dict[tuple, Future]:
    def submit(case: tuple) -> Future:
        kernel, D, options = case
        return compile_pool.submit(f"{__file__}:launch", "sm_90", kernel=kernel, D=D, case=options)

    cases = [("forward", *case) for case in FORWARD] + [("backward", *case) for case in BACKWARD]
    cases += [("backward", *case) for case in WIDEST]
    cases += [("one_pass", *case) for case in ONE_PASS]
    return submit_cases(submit, cases)


def check(
    fact: CompiledFacts, budget: int, spill_bytes: int, loads: int = 0, overlap: float = 0.9
) -> tuple[list[Loop], list[Loop]]:
    """Check every kernel; return its loops over full and over masked blocks, by consumer.

    loads: values that a full block may read back. overlap: the least share of the exponentials
    beside which the consumer's own products are in flight.
    """
    assert fact.spill_store_bytes <= spill_bytes, f"{fact.name}: {fact.spill_store_bytes} bytes"
    assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"
    assert fact.warnings == (), fact.name
    assert fact.mma == {"wgmma"}
    assert fact.wgmma_register_a > 0, f"{fact.name}: weights go through shared memory"
    loops = sorted(fact.loops, key=lambda loop: loop.total)
    full, masked = loops[: len(loops) // 2], loops[len(loops) // 2 :]
    assert len(full) == len(masked) == CONSUMERS
    for loop in loops:
        assert loop.overlap is not None and loop.overlap >= overlap, f"{fact.name}: {loop.overlap}"
    for loop in full:
        spills = (loop.count("LDL"), loop.count("STL"))
        assert spills[0] <= loads and spills[1] == 0, f"{fact.name} spills in its loop: {spills}"
        # A mask takes one a score; a quotient that ptxas leaves in the loop, a few.
        assert loop.count("FSEL") < 8, f"{fact.name} masks full blocks"
        assert loop.total <= budget, f"{fact.name}: {loop.total} instructions"
        assert loop.count("MUFU.EX2") <= masked[0].count("MUFU.EX2")
    for loop in masked:
        assert loop.count("ISETP") >= 8
    return full, masked


def spill_bytes(kernel: str, case: str) -> int:
    return (PART_SPILL_BYTES if case == "part" else SPILL_BYTES)[kernel]


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: "-".join(map(str, case)))
def test_forward_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    D, name = case
    *tables, fact = compiled["forward", D, name].result()
    assert [x.name for x in tables] == TABLES.get(name, [])
    assert not any(x.spills for x in tables)
    budget = BUDGET[fact.name, name][D]
    full, masked = check(fact, budget, spill_bytes("forward", name))
    if name == "causal":
        assert max(loop.total for loop in masked) <= MASKED_BUDGET[fact.name][D]
    scores = 64 * forward_config(D, name == "all").BLOCK // 128  # a thread
    assert all(loop.count("MUFU.EX2") >= scores for loop in full)
    for loop in full + masked:
        # Of 64 rows of O a thread has D / 2 numbers, which one jump passes over.
        assert loop.count("VOTE") == 1 and loop.total - loop.least >= D // 2


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: "-".join(map(str, case)))
def test_backward_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    D, name = case
    facts = [f for f in compiled["backward", D, name].result() if f.name.startswith("hopper")]
    assert [f.name for f in facts] == ["hopper_backward_dq_kernel", "hopper_backward_dkv_kernel"]
    for fact in facts:
        loads = PART_LOADS.get(fact.name, 0) if name == "part" else 0
        budget = BUDGET[fact.name, name][D]
        _, masked = check(fact, budget, spill_bytes("backward", name), loads)
        if name == "causal":
            assert max(loop.total for loop in masked) <= MASKED_BUDGET[fact.name][D]


@pytest.mark.parametrize("case", WIDEST, ids=lambda case: "-".join(map(str, case)))
def test_backward_of_the_widest_heads_compiles_well(case: tuple, compiled: dict) -> None:
    D, name = case
    facts = [f for f in compiled["backward", D, name].result() if f.name.startswith("hopper")]
    assert [f.name for f in facts] == [
        "hopper_backward_dq_kernel",
        "hopper_backward_dkv_kernel",
        "hopper_backward_dkv_kernel",
    ]
    dq, dv, dk = WIDEST_BUDGET[name]
    check(facts[0], dq, spill_bytes("widest", name), loads=2)
    # Beside the exponentials of dV are the products of the other consumer alone.
    check(facts[1], dv, spill_bytes("widest", name), overlap=0.0)
    check(facts[2], dk, spill_bytes("widest", name), loads=2)


@pytest.mark.parametrize("case", ONE_PASS, ids=lambda case: "-".join(map(str, case)))
def test_one_pass_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    D, name = case
    start, *tables, both, finish = compiled["one_pass", D, name].result()
    assert [x.name for x in tables] == TABLES.get(name, [])
    assert both.name == "hopper_backward_dkv_kernel"
    # With Triton 3.8, addresses of dS^T that do not change are read from the stack.
    loads = 4 if name == "packed" else 0
    config = one_pass_config(D, name)
    spilled = spill_bytes("one_pass", name) if config.DQ_BY_TMA else THREADS_SPILL_BYTES
    full, masked = check(both, ONE_PASS_BUDGET[case], spilled, loads)
    if name not in ("packed", "part"):
        assert max(loop.total for loop in masked) <= ONE_PASS_MASKED_BUDGET
    for loop in full:
        by_tma, stores = loop.count("UTMAREDG"), loop.count("STS")
        pairs = sum(n for op, n in loop.opcodes.items() if re.match(r"REDG?\.\S*F32x2", op))
        if not config.DQ_BY_TMA:
            # [64, D / 2] numbers of 128 threads, and nothing on the way.
            assert (by_tma, stores, pairs) == (0, 0, 64 * D // 2 // 128 // 2)
        else:
            assert (by_tma, pairs) == (1, 0), "no TMA adds to dQ"
        found = loop.of_pair(64 * config.BLOCK, warps=4)
        assert found.shared_bytes == pytest.approx(ONE_PASS_BYTES[D], abs=0.1)
    for fact in (start, finish):
        assert fact.spill_store_bytes == 0, fact.name


def test_a_new_length_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_lengths", "sm_90")
    assert counts[1:] == [0, 0, 0]


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
