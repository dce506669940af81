"""Compiled code of each feature: no spills, and no mask in the loop of full blocks.

Nothing here runs on a GPU: the launchers themselves compile in worker processes.
"""

import itertools
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from nightly import gate_cases

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.backward_bias import launch_backward_bias
from fastattn.kernels.backward_relative import launch_backward_relative
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.arguments import tile_for
from fastattn.kernels.launch.block_sparsity import mask_for_keys, mask_for_queries
from fastattn.kernels.statistics import launch_weights
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import CompiledFacts, count_compilations
from fastattn.testing.compiling.sass import Loop

B, H_q, H_k, T = 2, 4, 2, 1000


@triton.jit
def before(b, h, q_pos, k_pos, table):
    return tl.load(table + k_pos) <= q_pos


@triton.jit
def first_heads(b, h, q_pos, k_pos):
    return h < 9


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


IDS = meta(B, T, dtype=torch.int32)
PER_ROW = meta(B, dtype=torch.int32)
PER_HEAD = meta(H_q, dtype=torch.float32)
STARTS = meta(9, dtype=torch.int32)
PLAIN = Options(right=0, scale=0.1)
CAUSAL = Options(causal=True, scale=0.1)
# Features over a causal mask: each alone, or two that take their registers in different places.
FLAGS: dict[str, Options] = {
    "causal": PLAIN,
    "prefix": CAUSAL._replace(prefix_lengths=PER_ROW),
    "first": CAUSAL._replace(left=9, keep_first=4),
    "documents": PLAIN._replace(q_documents=IDS, k_documents=IDS),
    "mask_mod": PLAIN._replace(mask_mod=before, mod_tensors=(meta(T, dtype=torch.int32),)),
    "varlen": PLAIN._replace(query_offset=None, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS),
    "softcap": PLAIN._replace(
        query_offset=None, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, softcap=30.0
    ),
    "alibi": PLAIN._replace(alibi_slopes=PER_HEAD, sinks=PER_HEAD),
    "relative_bias": PLAIN._replace(relative_bias=meta(H_q, 257, dtype=torch.float32)),
    "attn_bias": PLAIN._replace(attn_bias=meta(1, H_q, T, T)),
    "positions": CAUSAL._replace(
        left=300,
        q_positions=meta(1, T, dtype=torch.int32),
        k_positions=meta(B, T, dtype=torch.int32),
        alibi_slopes=PER_HEAD,
        fp32_results=True,
    ),
    "positions+relative_bias": CAUSAL._replace(
        left=300,
        q_positions=meta(B, T, dtype=torch.int32),
        k_positions=meta(1, T, dtype=torch.int32),
        relative_bias=meta(H_q, 257, dtype=torch.float32),
    ),
}


def launch(flag: str, D: int, *, backward: bool = True) -> None:
    """Launch the kernels of one feature on meta tensors."""
    options = FLAGS[flag]
    rows = 1 if options.cu_seqlens_q is not None else B
    q, k = meta(rows, H_q, T, D), meta(rows, H_k, T, D)
    launch_forward(q, k, k, options)
    if not backward:
        return
    lse = meta(rows, H_q, T, dtype=torch.float32)
    launch_backward(q, None, q, k, k, q, lse, options)
    if options.attn_bias is not None:
        launch_backward_bias(q, q, k, k, lse, lse, options)
    if options.relative_bias is not None:
        launch_backward_relative(q, q, k, k, lse, lse, options)


def launch_with_the_same_tile(flag: str, D: int) -> None:
    """Forward alone, with the tile of a plain call also where a feature takes another."""
    with tiles.forced(forward=tiles.lookup("forward", 2, D)):
        launch(flag, D, backward=False)


def launch_others(D: int) -> None:
    """Launch the kernels beside attention, with the tiles that its options take."""
    q, k = meta(B, H_q, T, D), meta(B, H_k, T, D)
    lse = meta(B, H_q, T, dtype=torch.float32)
    documents = FLAGS["documents"]
    mask_for_queries(documents, q, k, tile_for("backward_dq", documents, q, D))
    mask_for_keys(documents, q, k, tile_for("backward_dkv", documents, q, D))
    launch_weights(q, k, lse, PLAIN)
    launch_backward_bias(q, q, k, k, lse, lse, FLAGS["attn_bias"])


def compilations_for_new_biases() -> list[int]:
    """How many kernels gradients of biases compile: a first one, then other shapes and lengths."""

    def backward(T: int, *shape: int) -> None:
        q, lse = meta(B, H_q, T, 32), meta(B, H_q, T, dtype=torch.float32)
        options = PLAIN._replace(attn_bias=meta(*shape))
        launch_backward_bias(q, q, q, q, lse, lse, options)

    shapes = [(B, H_q, 64, 64), (1, H_q, 4096, 4096), (B, 1, 64, 64)]
    shapes += [(1, H_q, 1, 64), (B, 1, 64, 1), (1, 1, 1, 1), (B, H_q, 1, 1), (1, H_q, 63, 63)]
    return [
        count_compilations(lambda shape=shape: backward(max(shape[2:]), *shape)) for shape in shapes
    ]


def compilations_for_other_heads() -> list[int]:
    """How many kernels forwards of parts of the heads compile: a first one, then other parts."""
    q = meta(B, H_q, T, 32)
    options = PLAIN._replace(
        dropout=0.5, dropout_seed=meta(2, dtype=torch.int64), mask_mod=first_heads
    )
    return [
        count_compilations(
            lambda n=n: launch_forward(q, q, q, options._replace(first_head=n, all_heads=64))
        )
        for n in (1, 0, 16, 7)
    ]


# Of these the plan is a range.
IN_RANGES = ("prefix", "first", "varlen")
# And of these a table, in which the loop looks up where the next block stands.
BY_TABLE = ("documents", "mask_mod")
FEW, LOOKUP = 8, 40  # instructions
HEAD_DIMS = (64, 128)
# Each for one head dim, in turns.
LOOPS = [(flag, HEAD_DIMS[n % 2]) for n, flag in enumerate((*IN_RANGES, *BY_TABLE))]
# What takes the same tiles as plain calls, and the kernels of biases. `test_compile` has what
# takes smaller tiles all at once, and lengths, padding and offsets for every target.
ALONE = gate_cases(
    [("softcap", "sm_90"), ("relative_bias", "sm_90"), ("positions", "sm_90")],
    [
        ("documents", "sm_80"),
        ("alibi", "sm_100"),
        ("attn_bias", "sm_80"),
        ("positions+relative_bias", "sm_90"),
    ],
)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple[Any, ...], Future]:
    """All cases, submitted at once so that every worker has something to do."""
    loops = {
        (flag, D): compile_pool.submit(
            f"{__file__}:launch_with_the_same_tile", "sm_90", flag=flag, D=D
        )
        for flag, D in (*itertools.product(("causal",), HEAD_DIMS), *LOOPS)
    }
    alone = {
        (flag, target): compile_pool.submit(f"{__file__}:launch", target, flag=flag, D=64)
        for flag, target in ALONE
    }
    return {**loops, **alone}


def attention_kernels(facts: list[CompiledFacts]) -> list[CompiledFacts]:
    return [fact for fact in facts if fact.name.startswith("attention_")]


@pytest.mark.parametrize(("flag", "D"), LOOPS)
def test_masks_cost_full_blocks_nothing(
    flag: str, D: int, compiled: dict[tuple[Any, ...], Future]
) -> None:
    """Beside those of the plain causal kernel, a look at a table and no compares or selects."""

    def loops(name: str) -> tuple[Loop, Loop]:
        (fact,) = attention_kernels(compiled[name, D].result())
        full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
        assert full.count("MUFU.EX2") == boundary.count("MUFU.EX2") > 0
        return full, boundary

    plain, _ = loops("causal")
    full, boundary = loops(flag)
    assert full.count("MUFU.EX2") == plain.count("MUFU.EX2"), "tiles differ"
    assert full.count("FSEL") == plain.count("FSEL") == 0
    assert boundary.count("FSEL") > 0
    assert full.total - plain.total <= (LOOKUP if flag in BY_TABLE else FEW)


# In no loop.
SPILL_BYTES = {("alibi", "sm_100"): 328}


@pytest.mark.parametrize(("flag", "target"), ALONE)
def test_each_feature_compiles_well(
    flag: str, target: str, compiled: dict[tuple[Any, ...], Future]
) -> None:
    facts = attention_kernels(compiled[flag, target].result())
    assert len(facts) == 3 + ("bias" in flag)
    for fact in facts:
        fine = fact.spill_store_bytes <= SPILL_BYTES.get((flag, target), 0) or fact.spills_little
        assert fine, f"{fact.name}: {fact.spill_store_bytes} bytes"
        assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"
        assert fact.warnings == ()


@pytest.mark.parametrize(
    ("D", "target"),
    gate_cases([(64, "sm_90")], [(128, "sm_90"), (64, "sm_80"), (128, "sm_80")]),
)
def test_what_is_launched_beside_attention_compiles_well(
    D: int, target: str, compile_pool: CompilePool
) -> None:
    facts = compile_pool.facts(f"{__file__}:launch_others", target, D=D)
    assert [fact.name for fact in facts] == [
        "block_sparsity_kernel",
        "block_sparsity_kernel",
        "attention_weights_kernel",
        "attention_backward_bias_kernel",
    ]
    # The gradient of a bias has the tiles of dQ beside one.
    allowed = 640 if (D, target) == (128, "sm_80") else 0
    for fact in facts:
        assert fact.spill_store_bytes <= allowed, f"{fact.name}: {fact.spill_store_bytes} bytes"
        assert fact.fits_shared_memory, f"{fact.name}: {fact.shared_bytes} bytes of shared memory"


def test_a_bias_of_another_shape_compiles_nothing(compile_pool: CompilePool) -> None:
    """Only what TMA cannot walk has a kernel of its own: one row, one key, rows of odd lengths."""
    counts = compile_pool.call(f"{__file__}:compilations_for_new_biases", "sm_90")
    assert counts == [1, 0, 0, 1, 0, 0, 0, 0]


def test_other_heads_of_a_whole_compile_nothing(compile_pool: CompilePool) -> None:
    """Beside a table of blocks, where the whole's number of heads is the same or another."""
    counts = compile_pool.call(f"{__file__}:compilations_for_other_heads", "sm_90")
    assert counts == [2, 0, 0, 0]
