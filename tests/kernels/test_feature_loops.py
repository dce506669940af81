"""Instructions and bytes that the loops of the kernels take with each feature."""

from concurrent.futures import Future

import pytest
import torch
import triton
import triton.language as tl
from nightly import gate_cases

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.forward import launch_forward
from fastattn.kernels.launch.arguments import tile_for
from fastattn.options import Options
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import CompiledFacts
from fastattn.testing.compiling.sass import Loop

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
# Instructions of a thread, and bytes of shared memory, that a pair of a full block takes at most in
# forward, dQ and dK/dV. The larger of both in plain calls on sm_90 is 16, 24.3 and 44.8 with 128
# columns, 8.2, 12 and 22.4 with 64; on sm_80 45, 102 and 127, 20.5, 34.6 and 62.7.
FULL = {
    ("sm_90", "attn_bias", 128): (16.6, 26.9, 47.4),
    ("sm_90", "attn_bias", 64): (10.9, 14.7, 25),
    ("sm_90", "attn_bias fp32", 128): (16.6, 29.4, 49.9),
    ("sm_90", "attn_bias by pointers", 128): (23.7, 33.9, 53.8),
    ("sm_90", "attn_bias by pointers", 64): (21.8, 20.5, 33.3),
    ("sm_90", "relative_bias", 128): (17.3, 25.6, 43.5),
    ("sm_90", "relative_bias", 64): (14.1, 13.4, 25),
    ("sm_90", "dropout", 128): (29.4, 30.7, 52.5),
    ("sm_90", "dropout", 64): (27.5, 25.6, 35.8),
    ("sm_90", "attn_mask", 128): (17.3, 25.6, 43.5),
    ("sm_90", "attn_mask", 64): (9.6, 13.4, 25),
    ("sm_90", "attn_mask", 256): (42.2, 66.6, 44.8, 71.7),
    ("sm_90", "functions", 128): (17.9, 25.6, 43.5),
    ("sm_90", "functions", 64): (16, 14.7, 25),
    ("sm_90", "stride", 128): (17.3, 25.6, 43.5),
    ("sm_90", "attn_bias and mask", 128): (29.4, 34.6, 43.5),
    ("sm_90", "attn_bias and dropout", 128): (46.1, 41, 51.2),
    ("sm_90", "attn_bias and dropout", 64): (39.7, 38.4, 46.1),
    ("sm_80", "attn_mask", 128): (46.1, 104, 128),
    ("sm_80", "attn_mask", 64): (21.8, 35.8, 64),
    ("sm_80", "functions", 128): (46.1, 104, 128),
    ("sm_80", "attn_bias and dropout", 128): (53.8, 102, 154),
    ("sm_80", "attn_bias", 128): (46.1, 104, 128),
    ("sm_80", "attn_bias", 64): (23.7, 35.8, 64),
    ("sm_80", "relative_bias", 128): (46.1, 104, 128),
    ("sm_80", "dropout", 128): (51.2, 109, 133),
    ("sm_80", "dropout", 64): (33.3, 41, 69.1),
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
CASES = gate_cases(ALWAYS, [case for case in FULL if case not in ALWAYS])


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


def spent(fact: CompiledFacts, loop: Loop, feature: str, D: int) -> float:
    """Instructions of a thread or bytes of shared memory for a pair, whichever are more."""
    q = torch.empty(1, 1, T, D, dtype=torch.bfloat16, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastattn.kernels.launch.tiles.current_arch", lambda: fact.target)
        tile = tile_for(KINDS[fact.name], FEATURES[feature], q, D, streams_bias=True)
    return max(loop.of_pair(tile.BLOCK_M * tile.BLOCK_N, fact.num_warps))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_full_blocks(case: tuple[str, str, int], compiled: dict[tuple, Future]) -> None:
    target, feature, D = case
    facts = [fact for fact in compiled[case].result() if fact.name in KINDS]
    for fact, most in zip(facts, FULL[case], strict=True):
        assert fact.mma == ({"wgmma"} if target == "sm_90" else {"mma.sync"})
        assert fact.fits_shared_memory
        full, boundary = sorted(fact.loops, key=lambda loop: loop.total)
        assert spent(fact, full, feature, D) <= most, fact.name
        # lse and delta alone come as copies of four bytes each, which take many times their share.
        assert full.opcodes.get("LDGSTS.E", 0) <= 2, fact.name
        # Biases in fp32 leave one number too many for the registers.
        most_full, most_boundary = SPILLED.get(feature, (feature == "attn_bias fp32", 2))
        assert full.count("LDL", "STL") <= most_full
        assert boundary.count("LDL", "STL") <= most_boundary


@pytest.mark.parametrize(("D", "most"), gate_cases([(128, (16.9, 25))], [(64, (11.8, 12.9))]))
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
        assert spent(fact, holed, "key_padding_mask", D) <= bound, fact.name
        assert holed.total <= 1.29 * full.total, fact.name
        assert boundary.total <= 1.53 * full.total, fact.name
        for loop in (holed, boundary):
            assert loop.count("LDG") == 2
            assert loop.count("LDL", "STL") == 0
