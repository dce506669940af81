"""The model of speed: its counts on instructions written out, and on kernels that are compiled."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool, compiled_cases
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.sass import Loop, read_sass, shared_bytes
from fastattn.testing.compiling.speed import Clocks, loop_clocks, programs_at_once

# Products of each kernel with the head dim: S, P V; S, dP, dQ; S, dP, dV, dK.
PRODUCTS = {
    "attention_forward_kernel": 2,
    "attention_backward_dq_kernel": 3,
    "attention_backward_dkv_kernel": 4,
}
KIND = {
    "attention_forward_kernel": "forward",
    "attention_backward_dq_kernel": "backward_dq",
    "attention_backward_dkv_kernel": "backward_dkv",
}


HEAD_DIMS = compiled_cases([128], [64])


def launch(D: int) -> None:
    q = torch.empty(1, 2, 512, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 2, 512, device="meta")
    options = Options(right=0, scale=0.1)
    launch_forward(q, q, q, options)
    launch_backward(q, None, q, q, q, q, lse, options)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[int, Future]:
    return {D: compile_pool.submit(f"{__file__}:launch", "sm_90", D=D) for D in (*HEAD_DIMS, 256)}


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        # A and B from shared memory: (64 + 128) rows of 32 bytes for four warps.
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT", 1536),
        ("HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88", 512),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R88, R24, gdesc[UR8], R88, gsb0", 512),
        ("LDSM.16.M88.4 R24, [R31+UR22]", 512),
        ("LDSM.16.MT88.2 R24, [R31+UR22]", 256),
        ("LDSM.16.M88 R24, [R31+UR22]", 128),
        ("LDS R27, [R10]", 128),
        ("STS.64 [R5], R6", 256),
        ("LDGSTS.E.BYPASS.128 [R16], desc[UR14][R14.64], P1", 512),
        ("LDG.E.128 R16, desc[UR14][R14.64]", 0),
        # To global memory: what leaves the registers.
        ("REDG.E.ADD.F32x2.FTZ.RN.STRONG.GPU desc[UR40][R218.64+0x20], R24", 256),
        ("RED.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR40][R218.64], R24", 512),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5", 128),
        ("RED.E.ADD.F16x2.RN.STRONG.GPU [R2.64], R5", 128),
        ("RED.E.ADD.64.STRONG.GPU [R2.64], R4", 256),
        ("RED.E.ADD.STRONG.GPU [R2.64], R5", 128),
        ("UTMAREDG.4D.ADD [UR8], [UR4]", 0),
        ("FFMA R1, R2, R3, R4", 0),
    ],
)
def test_bytes_of_shared_memory_of_a_warp(text: str, moved: int) -> None:
    ((instruction,),) = read_sass(f"Function : f\n        /*0010*/                   {text} ;")
    assert shared_bytes(instruction) == moved


def test_clocks_of_a_loop_by_hand() -> None:
    """Forward of 128 queries by 128 keys, D 128, 8 warps: the products alone take 2048 clocks."""
    opcodes = {"HGMMA.64x128x16.F32.BF16": 16, "MUFU.EX2": 66, "FFMA": 407}
    loop = Loop(0, opcodes, overlap=0.0, shared_bytes=8 * 1536 + 8 * 1024)
    clocks = loop_clocks(loop, "sm_90", 8, streamed_bytes=2 * 128 * 128 * 2)
    assert (clocks.issue, clocks.tensor, clocks.exponentials) == (489 * 2, 2048, 66 * 16)
    assert clocks.shared == (8 * 20480 + 65536) / 128
    assert clocks.bound == 2048
    assert (clocks / 128**2).tensor == 0.125


def test_a_lone_group_of_warps_waits_for_its_products() -> None:
    loop = Loop(0, {"HGMMA.64x64x16.F32.BF16": 8, "MUFU.EX2": 32, "FADD": 60}, overlap=0.25)
    alone = loop_clocks(loop, "sm_90", 4)
    assert (alone.tensor, alone.issue, alone.exponentials) == (256, 100, 256)
    assert alone.bound == 256 + 0.75 * 256
    assert loop_clocks(loop, "sm_90", 4, programs=2).bound == 256
    assert Clocks(1, 2, 3, 4).bound == 4


@pytest.mark.parametrize(
    ("target", "clocks"), [("sm_80", 64), ("sm_86", 256), ("sm_90", 64), ("sm_120", 256)]
)
def test_products_of_single_warps(target: str, clocks: int) -> None:
    loop = Loop(0, {"HMMA.16816.F32.BF16": 8}, overlap=None)
    assert loop_clocks(loop, target, 4).tensor == clocks


@pytest.mark.parametrize(("target", "clocks"), [("sm_80", 600), ("sm_86", 300), ("sm_100", 300)])
def test_products_of_fp32_are_those_of_vector_instructions(target: str, clocks: int) -> None:
    opcodes = {"FFMA": 100, "FFMA2": 100, "LDS.128": 40, "MUFU.EX2": 3}
    opcodes["HFMA2.MMA"] = 1  # which puts a constant down
    loop = Loop(0, opcodes, shared_bytes=40 * 512)
    found = loop_clocks(loop, target, 4)
    assert (found.tensor, found.issue, found.shared) == (clocks, 244, 640)
    assert found.bound == 640
    beside = Loop(0, {"FFMA": 100, "HMMA.16816.F32": 8})
    assert loop_clocks(beside, target, 4).tensor != 150


def test_products_of_tensor_memory_are_waited_for_by_all_warps() -> None:
    """Of 128 queries and 64 keys of 128 columns, then of 64 queries, which take as long."""
    loop = Loop(0, {"UTCHMMA.128x64x16": 8, "FADD": 60}, overlap=0.0, once_bytes=8 * 6144)
    alone = loop_clocks(loop, "sm_100", 8)
    assert (alone.tensor, alone.shared, alone.issue) == (256, 384, 68 * 2)
    assert alone.bound == 384 + 136
    assert loop_clocks(loop, "sm_100", 8, programs=2).bound == 384
    half = Loop(0, {"UTCHMMA.64x64x16": 8}, overlap=0.0)
    assert loop_clocks(half, "sm_100", 4).tensor == 256


def test_programs_share_tensor_memory() -> None:
    fact = CompiledFacts(
        "f", "sm_100", 4, 2, 1000, True, 100, 0, 0, frozenset(), 0, (), None, tensor_columns=256
    )
    assert programs_at_once(fact) == 2
    assert programs_at_once(replace(fact, tensor_columns=0)) == 5


def test_clocks_of_a_loop_of_amd() -> None:
    """128 queries by 32 keys, D 128, by 4 waves: products and vector instructions are balanced."""
    opcodes = {"v_mfma.f32_32x32x8_bf16": 32, "v_fma.f32": 183, "v_exp.f32_e32": 17, "s_add.u32": 9}
    loop = Loop(0, opcodes, shared_bytes=20480)
    clocks = loop_clocks(loop, "gfx942", 4, programs=2)
    assert (clocks.tensor, clocks.issue, clocks.shared) == (1024, 183 * 4 + 17 * 16, 640)
    assert clocks.bound == 1024
    assert loop_clocks(loop, "gfx942", 4).bound == 1024 + 1004
    assert loop_clocks(loop, "gfx950", 4).tensor == 512
    fp32 = Loop(0, {"v_mfma.f32_32x32x2_f32": 8})
    assert loop_clocks(fp32, "gfx942", 4).tensor == 512


@pytest.mark.parametrize(("kernel", "D"), [(kernel, D) for kernel in PRODUCTS for D in HEAD_DIMS])
def test_kernels_multiply_what_their_formulas_have(
    kernel: str, D: int, compiled: dict[int, Future]
) -> None:
    """No score is computed by two groups of warps: that doubles the products and what they read."""
    (fact,) = [fact for fact in compiled[D].result() if fact.name == kernel]
    for clocks in of_pairs(fact, D):
        assert clocks.tensor == PRODUCTS[kernel] * D / 2048


def test_wide_heads_compute_scores_once_for_each_gradient(compiled: dict[int, Future]) -> None:
    """dQ, dV and dK of 256 columns: 3, 2 and 3 products, which shared memory feeds in no more than
    1.5 times their own time. With both in one program, dK/dV took 3.6 clocks a pair in place of 1.
    """
    facts = [fact for fact in compiled[256].result() if "backward" in fact.name]
    full = [of_pairs(fact, 256)[0] for fact in facts]
    assert sorted(clocks.tensor for clocks in full) == [0.25, 0.375, 0.375]
    for clocks in full:
        assert clocks.bound <= 1.55 * clocks.tensor


def of_pairs(fact: CompiledFacts, D: int) -> list[Clocks]:
    """Clocks of a pair of query and key in each loop, that over full blocks first."""
    tile = tiles.tile_of("sm_90", KIND[fact.name], 2, D)
    loops = sorted(fact.loops, key=lambda loop: loop.total)
    pairs = tile.BLOCK_M * tile.BLOCK_N
    return [loop_clocks(loop, "sm_90", fact.num_warps) / pairs for loop in loops]
