"""Arguments of dense calls: what is served, a flag of every call, and the band of a window."""

from typing import Any

import pytest
import torch
import triton

import fastattn
from fastattn import checks
from fastattn.options import Options
from fastattn.testing import make_qkv

B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8


@triton.jit
def keep_two(b, h, i, j, one, other):
    return i == i


@triton.jit
def same(x, b, h, i, j):
    return x


def qkv(**replaced: Any) -> dict[str, Any]:
    return {**dict(zip("qkv", make_qkv(B, H_q, H_k, T_q, T_k, D), strict=True)), **replaced}


def test_functions_alone_and_tables_that_learn_serve_without_gradients() -> None:
    with torch.no_grad():
        o = fastattn.attention(**qkv(score_mod=same, backend="torch"))
        plain, _ = fastattn.attention(**qkv(backend="torch", return_lse=True))
        tables = {
            "mask_mod": keep_two,
            "mod_tensors": (torch.ones(H_q, requires_grad=True), torch.ones(2)),
        }
        assert torch.equal(o, plain)
        assert fastattn.attention(**qkv(**tables, backend="torch")).shape == o.shape


@pytest.mark.parametrize(
    ("causal", "window", "sides"),
    [
        (False, None, (None, None)),
        (True, None, (None, 0)),
        (False, 4, (3, 0)),
        (True, 1, (0, 0)),
        (False, (2, 3), (2, 3)),
        (True, (2, 3), (2, 0)),
        (True, (2, None), (2, 0)),
    ],
)
def test_band(causal, window, sides) -> None:
    left, right = checks.check_window(window)
    assert Options(causal=causal, left=left, right=right).band == sides
