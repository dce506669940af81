"""Compiled Hopper forward in 8 bits, and the kernel that packs its values."""

from concurrent.futures import Future

import pytest
import torch
from nightly import gate_cases

from fastattn.kernels.fp8_quantize import launch_head_codes
from fastattn.kernels.fp8_values import launch_pack_values
from fastattn.kernels.hopper.forward import launch_hopper_forward_fp8
from fastattn.kernels.hopper.tile_table import fp8_config
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import RELEASE, count_compilations

CONSUMERS = 2
# "all": every option that it knows. Its prologue may go to the stack, in bytes a thread.
CASES = gate_cases(
    [(128, "causal"), (128, "packed")], [(128, "all"), (64, "causal"), (256, "causal")]
)
PREPARED = gate_cases(["sm_90"], ["gfx942"])
SPILL_BYTES = {"causal": 0, "all": 80, "packed": {"3.8": 16, "3.9": 156}.get(RELEASE, 12)}
# Instructions of the loop over full blocks, of 128 keys, and of 64 for the widest heads. In 16 bits
# it takes 490, 531 and 457.
BUDGET = {
    (64, "causal"): 434,
    (128, "causal"): 468,
    (256, "causal"): 398,
    (128, "all"): 914,
    (128, "packed"): 468,
}


def meta(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def launch(D: int, case: str, T: int = 1000, B: int = 3, H: int = 2) -> None:
    options = Options(right=0, scale=0.1)
    if case == "all":
        lengths = meta(B, dtype=torch.int32)
        options = Options(
            left=9,
            right=9,
            key_lengths=lengths,
            query_offsets=lengths,
            prefix_lengths=lengths,
            causal=True,
            keep_first=2,
            scale=0.1,
            softcap=5.0,
            sinks=numbers(2 * H),
        )
    scales = (numbers(B, 2 * H), numbers(B, H), numbers(B, H))
    if case == "packed":
        offsets = meta(B + 1, dtype=torch.int32)
        options = options._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        B = 1
    q, k, v = meta(B, 2 * H, T, D), meta(B, H, T, D), meta(B, H, D, -(-T // 16) * 16)
    launch_hopper_forward_fp8(q, k, v, scales, torch.bfloat16, options)


def prepare(D: int, T: int = 1000, B: int = 3, H: int = 2) -> None:
    """Quantise, packed and not, and pack."""
    x = meta(B, T, H, D, dtype=torch.bfloat16).transpose(1, 2)
    lengths = meta(B, dtype=torch.int32)
    for packed in (False, True):
        launch_head_codes(x, lengths, None, packed)
    launch_pack_values(meta(B, T, H, D).transpose(1, 2))
    offsets = meta(B + 1, dtype=torch.int32)
    for packed in (False, True):
        launch_head_codes(x[:1], None, offsets, packed)
    launch_pack_values(meta(1, T, H, D).transpose(1, 2), offsets)


def compilations_for_new_shapes() -> list[int]:
    """How many kernels each launch compiled: those of the cases below, then other shapes."""

    def both(**sizes: int) -> None:
        launch(128, "causal", **sizes)
        launch(128, "packed", **sizes)
        prepare(128, **sizes)

    sizes = [{}, {"T": 1}, {"T": 4096}, {"T": 77}, {"B": 1}, {"H": 1}, {"H": 16}]
    return [count_compilations(lambda each=each: both(**each)) for each in sizes]


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple, Future]:
    """All cases, submitted at once so that every worker has something to do."""
    futures = {
        case: compile_pool.submit(f"{__file__}:launch", "sm_90", D=case[0], case=case[1])
        for case in CASES
    }
    return futures | {
        (target,): compile_pool.submit(f"{__file__}:prepare", target, D=128) for target in PREPARED
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_forward_in_8_bits_compiles_well(case: tuple, compiled: dict[tuple, Future]) -> None:
    D, options = case
    (fact,) = compiled[case].result()
    assert fact.spill_store_bytes <= SPILL_BYTES[options], fact.spill_store_bytes
    assert fact.fits_shared_memory, f"{fact.shared_bytes} bytes of shared memory"
    assert fact.warnings == ()
    BLOCK = fp8_config(D, options != "causal").BLOCK
    loops = sorted(fact.loops, key=lambda loop: loop.total)
    full, masked = loops[: len(loops) // 2], loops[len(loops) // 2 :]
    assert len(full) == len(masked) == CONSUMERS
    for loop in loops:
        assert loop.overlap is not None and loop.overlap >= 0.9, loop.overlap
        # Products of e4m3, 32 columns of Q and 32 keys an instruction; none has another type.
        types = {name.split(".", 2)[2] for name in loop.opcodes if "GMMA" in name}
        assert types == {"F32.E4M3.E4M3"}
        assert loop.count("QGMMA") == D // 32 + BLOCK // 32
        # No weight moves between threads: what is shuffled are maxima and sums of two rows.
        assert loop.count("SHFL") == 8
        # Two conversions make the four bytes of a register, and one instruction joins them.
        assert loop.count("F2FP") == 64 * BLOCK // 128 // 2
        assert loop.count("PRMT") <= 64 * BLOCK // 128 // 4 + 1
    for loop in full:
        assert loop.count("LDL", "STL") == 0
        assert loop.count("FSEL") < 8, "full blocks are masked"
        assert loop.total <= BUDGET[case], f"{loop.total} instructions"
    # Weights are register operands: as many as there are products with values.
    assert fact.wgmma_register_a == CONSUMERS * 3 * BLOCK // 32


@pytest.mark.parametrize("target", PREPARED)
def test_preparation_compiles_well(target: str, compiled: dict[tuple, Future]) -> None:
    facts = compiled[target,].result()
    codes = ["head_maxima_kernel", "head_codes_kernel", "head_codes_kernel"]
    assert [fact.name for fact in facts] == [*codes, "pack_values_kernel"] * 2
    for fact in facts:
        assert not fact.spills
        assert fact.shared_bytes <= 32 * 1024, "a multiprocessor should hold several programs"


def test_a_new_shape_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations_for_new_shapes", "sm_90")
    assert counts[1:] == [0] * 6
