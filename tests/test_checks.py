"""Arguments of dense calls: what is served, a flag of every call, and the band of a window."""

from typing import Any

import torch
import triton

import fastattn
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
