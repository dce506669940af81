"""Every mask, bias and dropout on the kernels against the oracle; scores of -inf and NaN."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from fuzz.judges import check_by_kernels

import fastattn
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw, to_device
from fastattn.testing.option_examples import option_examples

B, H_q, H_k, T_q, T_k, D, D_v, R = 2, 2, 1, 21, 37, 16, 8, 6


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    wide, long = tiles.TileConfig(32, 16), tiles.TileConfig(16, 32)
    with tiles.forced(forward=wide, backward_dq=long, backward_dkv=long, relative=long):
        yield


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


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature: str, device: str) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, D_v, device=device)
    assert_matches_reference(triton_attention, q, k, v, **to_device(FEATURES[feature], device))


@pytest.mark.parametrize("seed", range(20))
def test_packed_sequences(seed: int, one_thread: None, device: str) -> None:
    check_by_kernels("attention_varlen", seed, device)


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
