"""Every mask, bias and dropout on the kernels against the oracle: alone and packed.

Outputs, lse and every gradient, within the error budget. Runs in Triton's interpreter without a GPU
and compiled on one. Tiles are small, so that a few rows meet full blocks, boundary blocks and
blocks that are skipped.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn import reference
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw, to_device
from fastattn.testing.option_examples import option_examples, sets_that_cover_pairs, together

B, H_q, H_k, T_q, T_k, D, D_v, R = 2, 2, 1, 21, 37, 16, 8, 6


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    wide, long = tiles.TileConfig(32, 16), tiles.TileConfig(16, 32)
    with tiles.forced(forward=wide, backward_dq=long, backward_dkv=long, relative=long):
        yield


@triton.jit
def striped(b, h, q_pos, k_pos):
    return (k_pos // 16) % 2 == 0


@triton.jit
def hide_far(x, b, h, q_pos, k_pos):
    """A score that is itself -inf, so that no mask says what is hidden."""
    return tl.where(tl.abs(q_pos - k_pos) > 9, float("-inf"), 2 * x)


@triton.jit
def hide_far_grad(dx, x, b, h, q_pos, k_pos):
    return 2 * dx


@triton.jit
def past(b, h, q_pos, k_pos):
    return k_pos < q_pos


@triton.jit
def by_distance(x, b, h, q_pos, k_pos):
    return x / (q_pos - k_pos)


@triton.jit
def by_distance_grad(dx, x, b, h, q_pos, k_pos):
    return dx / (q_pos - k_pos)


# Relative keys and queries have tests of their own.
FEATURES = {
    name: options
    for name, options in option_examples(H_q, H_k, T_q, T_k, D, reach=R).items()
    if "relative_keys" not in options
}


triton_attention = partial(fastattn.attention, backend="triton")
triton_varlen = partial(fastattn.attention_varlen, backend="triton")


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature: str, device: str) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, D_v, device=device)
    assert_matches_reference(triton_attention, q, k, v, **to_device(FEATURES[feature], device))


# One of each kind: what sets the others of a kind apart is broadcasting, or how far they reach.
MEETING = {
    name: FEATURES[name]
    for name in (
        "causal", "prefix", "first-ahead", "positions", "stride-window-first", "padding", "lengths",
        "documents", "mask", "mask-mod", "softcap", "alibi-rows", "relative-bias", "bias",
        "score-mod", "sinks", "dropout", "two-products",
    )
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "names",
    [("softcap", "relative-bias"), ("stride-window-first", "bias"), ("score-mod", "dropout")],
    ids="+".join,
)
def test_in_16_bits(names: tuple[str, ...], dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, D_v, dtype=dtype, device=device)
    options = to_device(together(FEATURES, names), device)
    assert_matches_reference(
        triton_attention, q, k, v, causal=True, sinks=draw(H_q).to(device, dtype), **options
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_float_options_of_another_dtype(dtype: torch.dtype, device: str) -> None:
    """Read as fp32; their gradients come in their own dtype."""
    shapes = {"attn_bias": (H_q, 1, T_k), "relative_bias": (H_q, 2 * R + 1), "sinks": (H_q,)}
    options = {name: draw(*shape).to(device, dtype) for name, shape in shapes.items()}
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, device=device)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in options.items()}
        o = triton_attention(q, k, v, **leaves)
        return torch.autograd.grad(o.square().sum(), list(leaves.values()))

    for x, expected in zip(gradients(dtype), gradients(torch.float32), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, expected.to(dtype))


PACKED_Q, PACKED_K = (0, 20, 20, 21, 42), (0, 37, 40, 40, 61)
NOT_PACKED = {
    "key_padding_mask", "documents", "attn_mask", "attn_bias", "query_offset", "positions",
}  # fmt: skip
# For each of the four sequences, in place of each of the batch rows.
OF_SEQUENCES: dict[str, Any] = {
    "key_lengths": torch.tensor([33, 2, 5, 0]),
    "prefix_lengths": torch.tensor([22, 0, 9, 5]),
}
PACKED = {
    name: {n: OF_SEQUENCES.get(n, x) for n, x in options.items()}
    for name, options in FEATURES.items()
    if name in MEETING and not options.keys() & NOT_PACKED
}
PACKED["alibi-rows"] = {"alibi_slopes": draw(4, H_q).abs()}
PACKED["two-products"] = {
    "query2": draw(PACKED_Q[-1], H_q, D), "key2": draw(PACKED_K[-1], H_k, D, seed=1)
}  # fmt: skip


@pytest.mark.parametrize("names", sets_that_cover_pairs(PACKED, 8), ids="+".join)
def test_packed_sequences(names: tuple[str, ...], device: str) -> None:
    """One without queries, one without keys, more keys than queries and as many."""
    q, k, v = (
        x[0].transpose(0, 1).detach()
        for x in make_qkv(1, H_q, H_k, PACKED_Q[-1], PACKED_K[-1], D, D_v, device=device)
    )
    starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in (PACKED_Q, PACKED_K)]
    options = to_device(together(PACKED, names), device)
    assert_matches_reference(
        triton_varlen, q, k, v, *starts, oracle=reference.attention_varlen, **options
    )


def test_a_promise_about_a_mask_changes_nothing(device: str) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, device=device)
    promised = fastattn.BlockMask(striped, per_batch=False, per_head=False)
    assert_matches_reference(triton_attention, q, k, v, mask_mod=promised)
    o, expected = (triton_attention(q, k, v, mask_mod=mod) for mod in (promised, striped))
    assert torch.equal(o, expected)


def test_scores_that_hide_by_themselves(device: str) -> None:
    """A score_mod that returns -inf, for whole rows in some blocks and for one row everywhere."""
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, device=device)
    assert_matches_reference(
        triton_attention, q, k, v, score_mod=hide_far, score_mod_grad=hide_far_grad, query_offset=26
    )


def test_hidden_scores_that_are_no_numbers(device: str) -> None:
    """At distance 0, which the mask hides, score and gradient are divided by 0."""
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, device=device)
    mods = {"score_mod": by_distance, "score_mod_grad": by_distance_grad}
    assert_matches_reference(triton_attention, q, k, v, mask_mod=past, **mods)


def test_rows_of_nothing_but_minus_infinity(device: str) -> None:
    """A bias that hides every key of a row, in full blocks: o = 0, lse = -inf, no gradients."""
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, device=device)
    bias = draw(B, 1, T_q, T_k).to(device)
    bias[:, :, 3] = -math.inf
    bias[1] = -math.inf
    for sinks in (None, draw(H_q).to(device)):
        assert_matches_reference(triton_attention, q, k, v, attn_bias=bias, sinks=sinks)
    o, lse = triton_attention(q, k, v, attn_bias=bias, return_lse=True)
    assert (o[1] == 0).all() and (lse[1] == -math.inf).all()
    assert (o[0, :, 3] == 0).all() and lse[0, :, 4].isfinite().all()
