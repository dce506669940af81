"""Modelled clocks of the kernels with each feature: see `fastattn.testing.compiling.speed`."""

from concurrent.futures import Future

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch.arguments import tile_for
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool, compiled_cases
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.sass import Loop
from fastattn.testing.compiling.speed import loop_clocks, programs_at_once

B, H, T = 4, 16, 4096
KINDS = {
    "attention_forward_kernel": "forward",
    "attention_backward_dq_kernel": "backward_dq",
    "attention_backward_dkv_kernel": "backward_dkv",
}


@triton.jit
def every_other(b, h, q_pos, k_pos):
    return (q_pos // 3 + h + b) % 2 == k_pos % 2


@triton.jit
def by_distance(x, b, h, q_pos, k_pos):
    return x + 0.1 * tl.abs(q_pos - k_pos)


@triton.jit
def by_distance_grad(dx, x, b, h, q_pos, k_pos):
    return dx


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CAUSAL = Options(right=0, scale=0.1)
FEATURES = {
    "attn_bias": CAUSAL._replace(attn_bias=meta(1, H, T, T)),
    "dropout": CAUSAL._replace(dropout=0.1, dropout_seed=meta(2, dtype=torch.int64)),
    "relative_bias": CAUSAL._replace(relative_bias=meta(H, 257, dtype=torch.float32)),
    "key_padding_mask": CAUSAL._replace(key_padding_mask=meta(B, T, dtype=torch.bool)),
    "attn_bias fp32": CAUSAL._replace(attn_bias=meta(1, H, T, T, dtype=torch.float32)),
    "attn_bias by pointers": CAUSAL._replace(attn_bias=meta(1, H, T, T + 1)[..., :T]),
    "attn_mask": Options(attn_mask=meta(B, 1, T, T, dtype=torch.bool), scale=0.1),
    "functions": Options(
        mask_mod=every_other, score_mod=by_distance, score_mod_grad=by_distance_grad, scale=0.1
    ),
    "stride": Options(left=127, stride=128, causal=True, scale=0.1),
}
# Two at once, of which one is a bias for each score.
FEATURES["attn_bias and mask"] = FEATURES["attn_mask"]._replace(attn_bias=meta(1, H, T, T))
FEATURES["attn_bias and dropout"] = FEATURES["dropout"]._replace(attn_bias=meta(1, H, T, T))
# Clocks a pair of a full block in forward, dQ and dK/dV. Those of plain calls on sm_90 are 0.125,
# 0.19 and 0.35 with 128 columns, 0.064, 0.094 and 0.175 with 64; on sm_80 0.35, 0.8 and 0.99, 0.16,
# 0.27 and 0.49.
FULL = {
    ("sm_90", "attn_bias", 128): (0.13, 0.21, 0.37),
    ("sm_90", "attn_bias", 64): (0.085, 0.115, 0.195),
    ("sm_90", "attn_bias fp32", 128): (0.13, 0.23, 0.39),
    ("sm_90", "attn_bias by pointers", 128): (0.185, 0.265, 0.42),
    ("sm_90", "attn_bias by pointers", 64): (0.17, 0.16, 0.26),
    ("sm_90", "relative_bias", 128): (0.135, 0.2, 0.34),
    ("sm_90", "relative_bias", 64): (0.11, 0.105, 0.195),
    ("sm_90", "dropout", 128): (0.23, 0.24, 0.41),
    ("sm_90", "dropout", 64): (0.215, 0.2, 0.28),
    ("sm_90", "attn_mask", 128): (0.135, 0.2, 0.34),
    ("sm_90", "attn_mask", 64): (0.075, 0.105, 0.195),
    ("sm_90", "attn_mask", 256): (0.33, 0.52, 0.35, 0.56),
    ("sm_90", "functions", 128): (0.14, 0.2, 0.34),
    ("sm_90", "functions", 64): (0.125, 0.115, 0.195),
    ("sm_90", "stride", 128): (0.135, 0.2, 0.34),
    ("sm_90", "attn_bias and mask", 128): (0.23, 0.27, 0.34),
    ("sm_90", "attn_bias and dropout", 128): (0.36, 0.32, 0.4),
    ("sm_90", "attn_bias and dropout", 64): (0.31, 0.3, 0.36),
    ("sm_80", "attn_mask", 128): (0.36, 0.81, 1.0),
    ("sm_80", "attn_mask", 64): (0.17, 0.28, 0.5),
    ("sm_80", "functions", 128): (0.36, 0.81, 1.0),
    ("sm_80", "attn_bias and dropout", 128): (0.42, 0.8, 1.2),
    ("sm_80", "attn_bias", 128): (0.36, 0.81, 1.0),
    ("sm_80", "attn_bias", 64): (0.185, 0.28, 0.5),
    ("sm_80", "relative_bias", 128): (0.36, 0.81, 1.0),
    ("sm_80", "dropout", 128): (0.4, 0.85, 1.04),
    ("sm_80", "dropout", 64): (0.26, 0.32, 0.54),
}
# Instructions of a block that move spilled registers, where more than a few do: most of an
# attn_mask's are of boundary blocks, in which it is read.
SPILLED = {"attn_mask": (0, 28), "attn_bias and mask": (2, 50), "attn_bias and dropout": (10, 16)}
# Always every feature, every head dim and both GPUs.
ALWAYS = (
    ("sm_90", "attn_bias", 128),
    ("sm_90", "relative_bias", 64),
    ("sm_90", "dropout", 64),
    ("sm_90", "attn_mask", 128),
    ("sm_90", "functions", 64),
    ("sm_80", "attn_bias", 128),
)
CASES = compiled_cases(ALWAYS, [case for case in FULL if case not in ALWAYS])


def launch(feature: str, D: int) -> None:
    options = FEATURES[feature]
    q, lse = meta(B, H, T, D), meta(B, H, T, dtype=torch.float32)
    launch_forward(q, q, q, options)
    launch_backward(q, None, q, q, q, q, lse, options)


@pytest.fixture(scope="module")
def compiled(compile_pool: CompilePool) -> dict[tuple[str, str, int], Future]:
    return {
        (target, feature, D): compile_pool.submit(
            f"{__file__}:launch", target, feature=feature, D=D
        )
        for target, feature, D in CASES
    }


def clocks(fact: CompiledFacts, loop: Loop, feature: str, D: int) -> float:
    """The bound of a loop for each of its pairs."""
    q = torch.empty(1, 1, T, D, dtype=torch.bfloat16, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastattn.kernels.launch.tiles.current_arch", lambda: fact.target)
        tile = tile_for(KINDS[fact.name], FEATURES[feature], q, D, streams_bias=True)
    programs = programs_at_once(fact)
    found = loop_clocks(loop, fact.target, fact.num_warps, programs=programs)
    return (found / (tile.BLOCK_M * tile.BLOCK_N)).bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_full_blocks(case: tuple[str, str, int], compiled: dict[tuple, Future]) -> None:
    target, feature, D = case
    facts = [fact for fact in compiled[case].result() if fact.name in KINDS]
    for fact, most in zip(facts, FULL[case], strict=True):
        assert fact.mma == ({"wgmma"} if target == "sm_90" else {"mma.sync"})
        assert fact.fits_shared_memory
        full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
        assert clocks(fact, full, feature, D) <= most, fact.name
        # lse and delta alone come as copies of four bytes each, which take many times their share.
        assert full.opcodes.get("LDGSTS.E", 0) <= 2, fact.name
        # Biases in fp32 leave one number too many for the registers.
        most_full, most_boundary = SPILLED.get(feature, (feature == "attn_bias fp32", 2))
        assert full.count("LDL", "STL") <= most_full
        assert boundary.count("LDL", "STL") <= most_boundary


@pytest.mark.parametrize(
    ("D", "most"), compiled_cases([(128, (0.132, 0.195))], [(64, (0.092, 0.101))])
)
def test_holes_of_a_padding_mask(
    D: int, most: tuple[float, ...], compile_pool: CompilePool
) -> None:
    """Blocks in which the padding alone hides keys: a bit a key and a choice a score.

    Those and boundary blocks load nothing in place but two words of bits.
    """
    found = compile_pool.facts(f"{__file__}:launch", "sm_90", feature="key_padding_mask", D=D)
    facts = [fact for fact in found if fact.name in KINDS][:2]
    for fact, bound in zip(facts, most, strict=True):
        full, holed, boundary = sorted(fact.loops, key=lambda loop: loop.total)
        assert clocks(fact, holed, "key_padding_mask", D) <= bound, fact.name
        assert holed.total <= 1.29 * full.total, fact.name
        assert boundary.total <= 1.53 * full.total, fact.name
        for loop in (holed, boundary):
            assert loop.count("LDG") == 2
            assert loop.count("LDL", "STL") == 0
