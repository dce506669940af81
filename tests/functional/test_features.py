"""Packed sequences on the kernels against the oracle, and scores of -inf and NaN."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import triton
import triton.language as tl
from fuzz.judges import check_by_kernels

import fastattn
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw

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


triton_attention = partial(fastattn.attention, backend="triton")


@pytest.mark.parametrize("seed", range(20))
def test_packed_sequences(seed: int, one_thread: None, device: str) -> None:
    check_by_kernels("attention_varlen", seed, device)


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
