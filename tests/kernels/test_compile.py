"""Every kernel compiles for every GPU: no spills, fits shared memory, on matrix units, cheap."""

import math
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import compiled_cases
import machine_code
import meta_launches
import pytest
from compiled_cases import Case
from machine_code import Loop, sass_of
from nightly import gate_cases

from fastattn.kernels.hopper.tile_table import forward_config, fp8_config
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.arguments import tile_for
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import (
    RELEASE,
    CompiledFacts,
)

DAY, NIGHT = compiled_cases.read(Path(__file__).with_name("compiled.txt"))
CASES = gate_cases(DAY, NIGHT)
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "a case is in two rows"
UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
UNITS |= {"gfx1100": "wmma", "gfx1201": "wmma"}  # mma.sync of the others
# Head dims from which selected attention has dK and dV apart; of others 256.
WIDE = {"gfx942": math.inf, "gfx1100": 128, "gfx1201": 128}
CONSUMERS = 2  # of a Hopper kernel
SCORE_MODS = ("functions", "reading")  # options with a score_mod
# Bytes of spills a thread: tiles were chosen for Triton 3.7; 3.6 runs ptxas with other options.
USUAL_SPILL_BYTES = 32 if RELEASE == "3.6" else 0
KINDS = {
    "attention_forward_kernel": "forward",
    "attention_backward_dq_kernel": "backward_dq",
    "attention_backward_dkv_kernel": "backward_dkv",
}
FORWARD, DQ, DKV = KINDS
PREPARED = ["head_maxima_kernel", "head_codes_kernel", "head_codes_kernel", "pack_values_kernel"]
# Kernels of each launch, without tables of blocks, of tiles and of bits of padding.
KERNELS = {
    "forward": [FORWARD], "plain-forward": [FORWARD], "max-forward": [FORWARD],
    "backward": [DQ, DKV],
    "one-pass": ["start_dq_kernel", DKV, "finish_dq_kernel"],
    "bias": ["attention_backward_bias_kernel"], "relative": ["attention_backward_relative_kernel"],
    "mods": ["attention_backward_mods_kernel"] * 3,
    "beside": ["block_sparsity_kernel"] * 2, "tangent": ["attention_tangent_kernel"],
    "tangent_backward": ["tangent_backward_dq_kernel", "tangent_backward_dkv_kernel"],
    "block_scores": ["block_scores_kernel"] * 2,
    "selected": ["selected_forward_kernel", "selected_backward_dq_kernel",
                 "selected_backward_dkv_kernel"],
    "statistics": ["attention_row_statistics_kernel", "attention_received_kernel",
                   "attention_weights_kernel"],
    "decode": ["decode_kernel", "combine_kernel"], "decode_once": ["decode_kernel"],
    # Tiles of 16 rows, their merge, and chunks.
    "packed": ["decode_kernel", "combine_kernel", "decode_kernel"],
    "merge": ["merge_kernel", "merge_prefix_kernel"],
    "append": ["append_kernel"], "hopper_fp8": ["hopper_forward_kernel"],
    "hopper forward": ["hopper_forward_kernel"],
    "hopper backward": ["hopper_backward_dq_kernel", "hopper_backward_dkv_kernel"],
    "hopper one-pass": ["start_dq_kernel", "hopper_backward_dkv_kernel", "finish_dq_kernel"],
    "fp8_codes": PREPARED * 2,
}  # fmt: skip
TABLES = {"padding_extents_kernel", "packed_costs_kernel", "packed_order_kernel"}
# Products of each kernel with the head dim; with dK and dV apart both compute the scores.
PRODUCTS = {FORWARD: 2, DQ: 3, DKV: 4}


@pytest.fixture(scope="module")
def compiled(
    compile_pool: CompilePool, request: pytest.FixtureRequest
) -> Callable[[str], list[CompiledFacts]]:
    """The facts of the kernels of a case, by its name."""
    submitted: dict[str, Future] = {}

    def submit(name: str) -> Future:
        case = BY_NAME[name]
        function, given = f"{compiled_cases.__file__}:run", case.arguments
        return compile_pool.submit(function, case.target, launch=case.launch, arguments=given)

    config = request.config
    if not (config.option.keyword or any("::" in name for name in config.args)):
        submitted.update({name: submit(name) for name in BY_NAME})

    def facts(name: str) -> list[CompiledFacts]:
        if name not in submitted:
            submitted[name] = submit(name)
        return [x for x in submitted[name].result() if x.name not in TABLES]

    return facts


def loops_of(fact: CompiledFacts) -> tuple[list[Loop], list[Loop]]:
    """Loops over full blocks, one a consumer, and over others."""
    loops = sorted(machine_code.loops(fact), key=lambda loop: loop.total)
    return loops[: len(loops) // 2], loops[len(loops) // 2 :]


def spills_little(fact: CompiledFacts) -> bool:
    """Whether it spills a few bytes once a program, outside its loops: smaller tiles cost more."""
    actual = machine_code.loops(fact)
    return bool(actual) and not any(x.spills for x in actual) and fact.spill_store_bytes <= 64


def kernels_of(case: Case) -> list[str]:
    """Names of the kernels that a case launches."""
    names = [case.launch]
    if case.launch == "hopper":
        names = [f"hopper {case.arguments[0]}"]
    if case.launch == "attention":
        names = case.arguments[0].split("+")
        scores = "bias" if "attn_bias" in case.arguments[2] else "relative"
        names = [scores if name == "scores" else name for name in names]
    kernels = [kernel for name in names for kernel in KERNELS[name]]
    if case.launch == "attention" and case.arguments[2] == "two" and DKV in kernels:
        kernels.append("finish_dq_kernel")  # adds up the gradient of key2
    if case.launch == "hopper" and case.arguments[0] == "backward" and _width(case) > 128:
        return [*kernels, kernels[-1]]
    if case.launch == "tangent_backward" and case.arguments[0] == 128:
        return [*kernels, kernels[-1]]
    if case.launch == "selected" and case.arguments[0] >= WIDE.get(case.target, 256):
        return [*kernels, kernels[-1]]
    if case.launch == "attention" and tile_of(case, DKV).apart:
        return [y for x in kernels for y in ([x, x] if x == DKV else [x])]
    return kernels


def _width(case: Case) -> int:
    return meta_launches.head_dims(case.arguments[1])[0]


def tile_of(case: Case, kernel: str) -> tiles.TileConfig:
    """The tile of a kernel of attention or decoding in a case."""
    how, D, *others = case.arguments
    if case.launch == "decode":
        kind = "decode_chunk_shared" if "latent" in str(how) else "decode_chunk"
        return tiles.tile_of(case.target, kind, 4 if "fp32" in others else 2, D)
    q = meta_launches.meta(2, 4, 1000, D, dtype="fp32" if "fp32" in others else "fp16")
    kind = "backward_one_pass" if how == "one-pass" and kernel == DKV else KINDS[kernel]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "current_arch", lambda: case.target)
        return tile_for(kind, meta_launches.options_of(others[0], D=D), q, D, streams_bias=True)


def unit_of(case: Case, fact: CompiledFacts) -> set[str]:
    """The matrix unit that a kernel of attention or decoding multiplies by."""
    if "fp32" in case.arguments:
        return {"mfma"} if case.target == "gfx942" else set()
    # 16 rows of decoding are too few for the matrix units of Hopper and Blackwell.
    few = case.launch == "decode" and not case.target.startswith("gfx")
    few = few and (len(case.arguments) < 5 or case.arguments[4] == 1)
    return {"mma.sync" if few else UNITS.get(case.target, "mma.sync")}


def few_moves(loops: list[Loop], most: float | None) -> bool:
    """Whether few instructions move spilled registers: so many, or below 1, that share."""
    if most is None:
        return True
    return all(x.spills <= (most if most >= 1 else most * x.total) for x in loops)


def check(case: Case, n: int, fact: CompiledFacts) -> None:
    """Hold the n-th kernel of a case to its limits."""
    hopper, attention = case.launch.startswith("hopper"), case.launch in ("attention", "decode")
    usual = math.inf if "moved" in case.limits else USUAL_SPILL_BYTES
    spilled, most = fact.spill_store_bytes, case.limit("spill", n, usual)
    assert spilled <= most or (not hopper and spills_little(fact)), f"{spilled} bytes"
    assert fact.fits_shared_memory, f"{fact.shared_bytes} bytes of shared memory"
    assert fact.warnings == ()
    if fact.name not in KINDS and fact.name not in ("decode_kernel", *HOPPER):
        return
    full, masked = loops_of(fact)
    if attention and "mma" not in case.limits:
        assert fact.mma == unit_of(case, fact)
    usual = 0.01 if case.target[:3] != "gfx" and "fp32" not in case.arguments else None
    assert few_moves(full, case.limit("moved", n, 0 if hopper else usual)), "full blocks spill"
    assert few_moves(masked, case.limit("moved_masked", n, None if hopper else usual))
    most = case.limit("masked", n, 1e9)
    most *= full[0].total if most < 10 else 1
    # A tree of tokens has no loop that is seen on every GPU.
    assert masked or case.launch == "packed"
    assert all(x.total <= most for x in masked), f"masked blocks: {[x.total for x in masked]}"
    most = case.limit("full", n, 1e9)
    # Loops that mask every block are alone.
    assert full or "full" not in case.limits, "no loop over full blocks"
    assert max((x.total for x in full), default=0) <= most, (
        f"full blocks: {[x.total for x in full]}"
    )
    if (most := case.limit("pair", n)) is not None:
        tile = tile_of(case, fact.name)
        assert full[0].of_pair(tile.BLOCK_M * tile.BLOCK_N, fact.num_warps) <= most
    if "selects" in case.limits:
        assert full[0].count("MUFU.EX2") == masked[0].count("MUFU.EX2") > 0
        assert full[0].count("FSEL") == 0 < masked[0].count("FSEL")


HOPPER = ("hopper_forward_kernel", "hopper_backward_dq_kernel", "hopper_backward_dkv_kernel")


def check_attention(case: Case, facts: list[CompiledFacts]) -> None:
    """Check single kernels, and all together, for properties beside their limits."""
    for fact in (x for x in facts if x.name in KINDS):
        full, masked = loops_of(fact)
        if fact.target == "sm_90" and fact.name == FORWARD and fact.mma == {"wgmma"}:
            assert fact.wgmma_register_a > 0, "weights go through shared memory"
        if case.arguments[2] == "key_padding":
            # In holes a bit a key and a choice a score; what is loaded in place are words of bits.
            assert masked[0].total <= 1.29 * full[0].total
            assert [loop.count("LDG") for loop in masked] == [2, 2]
        if case.arguments[1:] == (128, "relative") and (fact.target, fact.name) == ("sm_90", DQ):
            # Products by distance reach their keys through shared memory.
            assert full and all(loop.count("SHFL") == 0 for loop in full + masked)
        if case.arguments[2] == "full":
            # No thread asks another for its sum: what is left are two steps of two maxima.
            assert full[0].count("SHFL") == 4
        # lse and delta alone come as copies of four bytes each, which take many times their share.
        if "pair" in case.limits and fact.mma:
            # Triton 3.6 does not copy those of dK and dV in one transfer.
            most = 16 if (RELEASE, fact.name) == ("3.6", DKV) else 2
            assert full[0].opcodes.get("LDGSTS.E", 0) <= most
    if "once" in case.limits:
        check_products(case, facts)


def check_products(case: Case, facts: list[CompiledFacts]) -> None:
    """Check that each product of the formula is computed once, of what was loaded ahead."""
    products = 0.0
    for fact in facts:
        tile = tile_of(case, fact.name)
        full = loops_of(fact)[0][0]
        # Rows with a window may have no registers for more than one stage.
        if case.target != "gfx942" and (tile.num_stages > 1 or case.arguments[2] == "causal"):
            assert full.count("LDG") == 0, f"{fact.name} waits for its loads"
        pairs = tile.BLOCK_M * tile.BLOCK_N
        products += multiply_adds(full, tile.num_warps) / pairs / case.arguments[1]
    assert products == sum(PRODUCTS.values()) + len(facts) - 3


def multiply_adds(loop: Loop, warps: int) -> float:
    """Products of 16-bit numbers in a pass of a loop by all warps of a program."""
    actual = 0.0
    for opcode, number in loop.opcodes.items():
        if shape := re.search(r"(\d+)x(\d+)x(\d+)", opcode.replace("16816", "16x8x16")):
            M, N, K = map(int, shape.groups())
            # Products of 64 rows keep tensor memory's unit as long as those of 128.
            M = 128 if opcode.startswith("UTCHMMA") else M
            together = {"HGMMA": 4, "UTCHMMA": warps}.get(opcode.split(".")[0], 1)
            actual += number * M * N * K * warps / together
    return actual


def check_decode(case: Case, facts: list[CompiledFacts]) -> None:
    decode, combine = facts
    assert not combine.spills
    if width := case.limits.get("width"):
        # In rows of 260 or 120 bytes, a load of 16 bytes would start at a misaligned address.
        widths = {
            x for loop in machine_code.loops(decode) for x in loop.opcodes if x.startswith("LDG")
        }
        assert widths - {"LDGDEPBAR", "LDG.E" if width == "LDG.E.U16" else ""} == {width}
    if "full" not in case.limits:
        return
    full, masked = (loops[0] for loops in loops_of(decode))
    assert full.count("FSEL") == 0 < masked.count("FSEL")
    # No value is read by the byte, none takes a conversion at a quarter of the rate.
    assert full.count("LDS.U8", "F2F", "I2F") == 0
    assert full.count("LDGSTS.E.BYPASS.128") > 0
    # Codes go from where they are loaded to the product, and are not put down again as numbers.
    # Triton 3.8 takes one of the two tiles of codes through shared memory a second time.
    again = 4 if RELEASE == "3.8" and {"int8", "fp8"} & {*case.arguments} else 0
    assert full.count("STS.128") == full.count("LDS.128") == again
    # Newer releases' warps tell one another of two rows at once.
    assert full.count("STS.64") == (1 if RELEASE in ("3.8", "3.9") else 0)


def check_decode_once(case: Case, facts: list[CompiledFacts]) -> None:
    """All threads' stores come before the release, and the acquire before all their loads."""
    (code,) = sass_of(facts[0].code)
    names = [instruction.base for instruction in code]
    (added,) = (n for n, name in enumerate(names) if name == "ATOMG")
    order = [x for x in names[added - 30 : added + 20] if x in ("BAR", "MEMBAR", "ATOMG", "CCTL")]
    at = order.index("ATOMG")
    assert order[at - 2 : at + 3] == ["BAR", "MEMBAR", "ATOMG", "CCTL", "BAR"]


def check_packed(case: Case, facts: list[CompiledFacts]) -> None:
    assert not facts[1].spills
    assert "fp32" in case.arguments or all(x.mma for x in facts[::2])


def check_hopper(case: Case, facts: list[CompiledFacts]) -> None:
    """Check the softmax under products, and options of which others pay nothing."""
    kernel, dims, options, *how = case.arguments
    D, D_v = meta_launches.head_dims(dims)
    for n, fact in enumerate(x for x in facts if x.name in HOPPER):
        assert fact.mma == {"wgmma"}
        assert fact.wgmma_register_a > 0, "weights go through shared memory"
        full, masked = loops_of(fact)
        assert len(full) == len(masked) == CONSUMERS
        # Beside the exponentials of dV of the widest heads are another consumer's products alone.
        least = 0.0 if (kernel, n) == ("backward", 1) and D > 128 else 0.9
        assert all(x.overlap is not None and x.overlap >= least for x in full + masked)
        for loop in full:
            assert loop.count("STL") == 0
            # A mask takes one a score; a quotient that ptxas leaves in the loop, a few.
            kept = masked[0].count("FSEL") // 2 if options == "dropout" else 0  # one a weight
            chosen = options in SCORE_MODS  # by the user's function
            assert chosen or loop.count("FSEL") < 8 + kept, "full blocks are masked"
            assert loop.count("MUFU.EX2") <= masked[0].count("MUFU.EX2")
        assert all(loop.count("ISETP") >= 8 for loop in masked)
        if kernel == "forward":
            dropped = options in ("dropout", *SCORE_MODS)
            config = forward_config(D, options == "capped-band", D_v=D_v, dropped=dropped)
            scores = 64 * config.BLOCK // 128  # a thread
            assert all(loop.count("MUFU.EX2") >= scores for loop in full)
            for loop in full + masked:
                depth = 192 if 128 < D <= 192 else config.D
                assert loop.count("HGMMA") == (depth + config.BLOCK) // 16, "of columns of zeros"
                # Of 64 rows of O a thread has half a row of numbers, which one jump passes over.
                lags = how != ["max"]
                assert loop.count("VOTE") == lags
                assert loop.total - loop.least >= config.value_tile // 2 * lags
        if kernel == "one-pass":
            check_sums_of_dq(D, how[0] if how else "", full)


def check_sums_of_dq(D: int, how: str, full: list[Loop]) -> None:
    """Check that a number of dQ goes to shared memory once, to its tile or to the sums."""
    config = meta_launches.one_pass_config(D, how)
    for loop in full:
        pairs = sum(n for op, n in loop.opcodes.items() if re.match(r"REDG?\.\S*F32x2", op))
        if config.DQ_BY_TMA:
            assert (loop.count("UTMAREDG"), pairs) == (1, 0), "no TMA adds to dQ"
        else:
            # [64, D / 2] numbers of 128 threads, and nothing on the way.
            assert (loop.count("UTMAREDG", "STS"), pairs) == (0, 64 * D // 2 // 128 // 2)


def check_hopper_fp8(case: Case, facts: list[CompiledFacts]) -> None:
    (fact,), (D, options) = facts, case.arguments
    BLOCK = fp8_config(D, options != "causal").BLOCK
    full, masked = loops_of(fact)
    assert len(full) == len(masked) == CONSUMERS
    for loop in full + masked:
        assert loop.overlap is not None and loop.overlap >= 0.9
        # Products of e4m3, 32 columns of Q and 32 keys an instruction; none has another type.
        types = {name.split(".", 2)[2] for name in loop.opcodes if "GMMA" in name}
        assert types == {"F32.E4M3.E4M3"}
        assert loop.count("QGMMA") == D // 32 + BLOCK // 32
        # No weight moves between threads: what is shuffled are maxima and sums of two rows.
        assert loop.count("SHFL") == 8
        # Two conversions make the four bytes of a register, and one instruction joins them.
        assert loop.count("F2FP") == 64 * BLOCK // 128 // 2
        assert loop.count("PRMT") <= 64 * BLOCK // 128 // 4 + 1
    assert all(loop.count("FSEL") < 8 for loop in full), "full blocks are masked"
    # Weights are register operands: as many as there are products with values.
    assert fact.wgmma_register_a == CONSUMERS * 3 * BLOCK // 32


def check_fp8_codes(case: Case, facts: list[CompiledFacts]) -> None:
    assert max(x.shared_bytes for x in facts) <= 32 * 1024, "too few programs a multiprocessor"


CHECKS = {
    "attention": check_attention,
    "decode": check_decode,
    "packed": check_packed,
    "decode_once": check_decode_once,
    "hopper": check_hopper,
    "hopper_fp8": check_hopper_fp8,
    "fp8_codes": check_fp8_codes,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles_well(case: Case, compiled: Callable[[str], list]) -> None:
    facts = compiled(case.name)
    tables = ["block_sparsity_kernel"] * (case.launch != "beside")
    facts = [fact for fact in facts if fact.name not in tables]
    assert [fact.name for fact in facts] == kernels_of(case)
    main = [x for x in facts if x.name in (*KINDS, *HOPPER)]
    for fact in facts:
        check(case, main.index(fact) if fact in main else 0, fact)
    CHECKS.get(case.launch, lambda case, facts: None)(case, facts)


@pytest.mark.parametrize(
    ("target", "instruction", "apart"),
    gate_cases([("sm_90", "F32x4", 4)], [("sm_80", "RED.E.ADD.F32", 1)]),
)
def test_atomics_take_as_many_columns_as_they_can(
    target: str, instruction: str, apart: int, compiled: Callable[[str], list]
) -> None:
    """Each element of a dQ tile is added once, in wide atomics; none in a compare-and-swap loop."""
    _, fact, _ = compiled(f"{target} attention one-pass 64 masks")
    tile = tiles.tile_of(target, "backward_one_pass", 2, 64)
    of_thread = tile.BLOCK_M * 64 // (32 * tile.num_warps)
    for loop in machine_code.loops(fact):
        atomics = {name: n for name, n in loop.opcodes.items() if name.startswith(("RED", "ATOM"))}
        assert all(instruction in name for name in atomics), atomics
        assert sum(atomics.values()) == of_thread // apart


@pytest.mark.nightly
def test_pages_are_loaded_as_far_ahead_as_plain_keys(compiled: Callable[[str], list]) -> None:
    """The load of the page number before them costs no buffer of keys and values."""
    plain, paged = (compiled(f"sm_90 decode {kind} 128")[0] for kind in ("contiguous", "paged"))
    assert paged.shared_bytes >= plain.shared_bytes


def test_stages_of_codes_are_half_of_those_of_numbers(compiled: Callable[[str], list]) -> None:
    """Two programs have three blocks each on their way: 98 KB, where an H100 needs about 40."""
    plain, codes = (compiled(f"sm_90 decode contiguous 128{x}")[0] for x in ("", " bf16 int8"))
    block, scales = 64 * 2 * 128, 64 * 2 * 4
    assert 3 * 2 * block <= plain.shared_bytes
    share = 0.63 if RELEASE == "3.8" else 0.6
    assert 3 * (block + scales) <= codes.shared_bytes <= share * plain.shared_bytes


@pytest.mark.parametrize("target", gate_cases(["sm_90"], ["sm_80"]))
def test_parts_are_merged_without_a_gap(target: str, compiled: Callable[[str], list]) -> None:
    """Programs that merge start early on Hopper, and wait before they read what others wrote."""
    decode, combine = compiled(f"{target} decode contiguous 128")
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
