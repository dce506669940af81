"""Errors of what changes scores and weights: their types, and what their messages name."""

from typing import Any

import numpy as np
import pytest
import torch
import triton

import fastattn
from fastattn.testing import make_qkv

B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8
LONG = torch.int64


@triton.jit
def keep_all(b, h, i, j):
    return i == i


@triton.jit
def keep_two(b, h, i, j, one, other):
    return i == i


@triton.jit
def same(x, b, h, i, j):
    return x


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"attn_mask": torch.zeros(T_q, T_k, dtype=LONG)},
        TypeError,
        r"attn_mask must be a bool \(True = attend\) or float tensor, got torch\.int64",
    ),
    (
        {"attn_mask": torch.ones(T_k, dtype=torch.bool)},
        ValueError,
        r"attn_mask must have 2 to 4 dimensions, got \[5\]",
    ),
    (
        {"attn_mask": torch.ones(3, T_q, T_k, dtype=torch.bool)},
        ValueError,
        r"attn_mask must broadcast to \[B, H_q, T_q, T_k\] = \[2, 4, 3, 5\], got \[3, 3, 5\]",
    ),
    (
        {"attn_mask": torch.ones(T_q, T_k, dtype=torch.bool, device="meta")},
        ValueError,
        "attn_mask must be on cpu, got meta",
    ),
    (
        {"attn_mask": torch.ones(T_q, T_k), "attn_bias": torch.ones(T_q, T_k)},
        ValueError,
        "attn_mask is a float tensor, so a bias, and attn_bias is given too",
    ),
    (
        {"attn_mask": torch.ones(T_q, T_k + 1), "causal": True},
        ValueError,
        r"attn_mask must broadcast to .* got \[3, 6\]",
    ),
    (
        {"attn_bias": torch.ones(T_q + 1, T_k)},
        ValueError,
        r"attn_bias must broadcast to .* got \[4, 5\]",
    ),
    (
        {"attn_bias": torch.ones(T_q, T_k, dtype=torch.bool)},
        TypeError,
        r"attn_bias must be a float tensor, got torch\.bool",
    ),
    ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, got 0"),
    ({"softcap": torch.ones(1)}, TypeError, r"softcap must be a float, got a tensor of .* \[1\]"),
    (
        {"alibi_slopes": torch.ones(H_q).double()},
        TypeError,
        r"alibi_slopes must be a float32 tensor, got torch\.float64",
    ),
    (
        {"alibi_slopes": torch.ones(H_k)},
        ValueError,
        r"alibi_slopes must have shape \[4\] or \[2, 4\], got \[2\]",
    ),
    (
        {"alibi_slopes": torch.ones(H_q, requires_grad=True)},
        ValueError,
        "alibi_slopes have no gradient, but require one; relative_bias is a bias that learns",
    ),
    (
        {"relative_bias": torch.ones(H_q, 4)},
        ValueError,
        r"relative_bias must have shape \[4, 2 R \+ 1\], got \[4, 4\]",
    ),
    ({"relative_bias": [0.0]}, TypeError, "relative_bias must be a float tensor, got list"),
    (
        {"relative_keys": torch.ones(1, 3, D).double()},
        TypeError,
        r"relative_keys must have the dtype of q \(torch\.float32\), got torch\.float64",
    ),
    (
        {"relative_keys": torch.ones(3, 3, D)},
        ValueError,
        r"relative_keys must have shape \[H, 2 R \+ 1, 8\] with H one of 1, 2, 4, got \[3, 3, 8\]",
    ),
    (
        {"relative_query": torch.ones(B, H_q, T_q, D)},
        ValueError,
        "relative_query is multiplied by relative_keys, which is not given",
    ),
    (
        {"relative_keys": torch.ones(1, 3, D), "relative_query": torch.ones(B, H_q, T_k, D)},
        ValueError,
        r"relative_query must have shape \[2, 4, 3, 8\], got \[2, 4, 5, 8\]",
    ),
    (
        {"relative_keys": torch.ones(1, 3, D), "relative_query": torch.ones(1).half()},
        TypeError,
        "relative_query must have the dtype of q",
    ),
    ({"sinks": torch.ones(H_k)}, ValueError, r"sinks must have shape \[4\], got \[2\]"),
    ({"sinks": torch.ones(H_q).long()}, TypeError, "sinks must be a float tensor, got torch.int64"),
    ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1\.0"),
    ({"dropout": -0.1}, ValueError, r"dropout must be in \[0, 1\), got -0\.1"),
    ({"dropout": "half"}, TypeError, "dropout must be a float, got str"),
    (
        {"dropout": torch.zeros(2), "heads": (0, H_q)},
        TypeError,
        "dropout must be a float, got a tens",
    ),
    (
        {
            "dropout": torch.zeros(2),
            "positions": tuple(torch.arange(T, dtype=torch.int32)[None] for T in (T_q, T_k)),
        },
        TypeError,
        "dropout must be a float, got a tensor",
    ),
    (
        {"score_mod": np.zeros(2), "heads": (0, H_q)},
        TypeError,
        r"score_mod must be a @triton\.jit fu",
    ),
    (
        {"dropout": 0.1, "dropout_seed": torch.zeros(3, dtype=LONG)},
        ValueError,
        r"dropout_seed must have shape \[2\], got \[3\]",
    ),
    (
        {"dropout": 0.1, "dropout_seed": 7},
        TypeError,
        "dropout_seed must be an int64 tensor, got int",
    ),
    (
        {"mask_mod": lambda b, h, i, j: True},
        TypeError,
        r"mask_mod must be a @triton\.jit function, got <lambda>",
    ),
    ({"mask_mod": 3}, TypeError, r"mask_mod must be a @triton\.jit function, got int"),
    (
        {"mask_mod": keep_all, "mod_tensors": (torch.ones(2),)},
        ValueError,
        r"mask_mod must take \(b, h, q_pos, k_pos\) and 1 mod_tensors, got \(b, h, i, j\)",
    ),
    (
        {"score_mod": keep_all},
        ValueError,
        r"score_mod must take \(x, b, h, q_pos, k_pos\) and 0 mod_tensors, got \(b, h, i, j\)",
    ),
    (
        {"score_mod": same},
        ValueError,
        "score_mod needs score_mod_grad where an input requires grad",
    ),
    (
        {"score_mod": same, "score_mod_grad": same},
        ValueError,
        r"score_mod_grad must take \(dx, x, b, h, q_pos, k_pos\) and 0 mod_tensors",
    ),
    (
        {"score_mod_grad": same},
        ValueError,
        "score_mod_grad is the gradient of score_mod, which is not given",
    ),
    (
        {"mod_tensors": [torch.ones(2)], "mask_mod": keep_all},
        TypeError,
        "mod_tensors must be a tuple of tensors, got list",
    ),
    (
        {"mod_tensors": (torch.ones(2),)},
        ValueError,
        "mod_tensors are read by mask_mod or score_mod; neither is given",
    ),
    (
        {"mod_tensors": (torch.ones(2, 2).T,), "mask_mod": keep_all},
        ValueError,
        r"mod_tensors\[0\] must be contiguous, got strides \[1, 2\]",
    ),
    (
        {"mod_tensors": (torch.ones(2),) * 9, "mask_mod": keep_all},
        ValueError,
        "mod_tensors must be at most 8, got 9",
    ),
    (
        {"mod_tensors": (2,), "mask_mod": keep_all},
        TypeError,
        r"mod_tensors\[0\] must be a torch\.Tensor, got int",
    ),
    (
        {"mod_tensors": (torch.ones(2), torch.ones(2, requires_grad=True)), "mask_mod": keep_two},
        ValueError,
        r"mod_tensors\[1\] has no gradient, but requires one",
    ),
]


@pytest.mark.parametrize("call", [fastattn.attention, fastattn.explain])
@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_arguments(call, options, error, message) -> None:
    with pytest.raises(error, match=message):
        call(*make_qkv(B, H_q, H_k, T_q, T_k, D), **options)


def test_mod_tensors_that_require_grad_serve_without_gradients() -> None:
    tables = (torch.ones(2, requires_grad=True), torch.ones(2))
    with torch.no_grad():
        fastattn.attention(
            *make_qkv(B, H_q, H_k, T_q, T_k, D), mask_mod=keep_two, mod_tensors=tables,
            backend="torch",
        )  # fmt: skip


def test_a_score_mod_alone_serves_without_gradients() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)
    with torch.no_grad():
        o = fastattn.attention(q, k, v, score_mod=same, backend="torch")
        assert torch.equal(o, fastattn.attention(q, k, v, backend="torch", return_lse=True)[0])
