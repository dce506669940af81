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


def codes() -> list[torch.Tensor]:
    return [x.detach().to(torch.float8_e4m3fn) for x in qkv().values()]


def cached() -> fastattn.KVCache:
    cache = fastattn.KVCache(B, H_k, T_k, D)
    cache.append(*(x.detach() for name, x in qkv().items() if name != "q"))
    return cache


@pytest.mark.parametrize("got", [1, torch.zeros(2)], ids=["int", "a tensor"])
@pytest.mark.parametrize(
    "call",
    [
        lambda **how: fastattn.attention(**qkv(), **how),
        lambda **how: fastattn.attention_varlen(
            *torch.zeros(3, T_q, H_q, D), torch.tensor([0, T_q]), **how
        ),
        lambda **how: fastattn.dot_product_attention(*qkv().values(), **how),
        lambda **how: fastattn.additive_attention(*qkv().values(), torch.ones(D), **how),
        lambda **how: fastattn.attention_fp8(*codes(), **how),
        lambda **how: fastattn.decode_attention(qkv()["q"].detach(), cached(), **how),
        lambda **how: fastattn.cascade_attention(torch.zeros(1, H_q, 1, D), None, None, **how),
    ],
    ids=["dense", "packed", "dot product", "additive", "fp8", "decode", "cascade"],
)
def test_return_lse_is_a_flag(call, got) -> None:
    with pytest.raises(TypeError, match=r"return_lse must be a bool, got (int|a tensor)"):
        call(return_lse=got)


def test_good_arguments_pass() -> None:
    o = fastattn.attention(
        **qkv(
            window=(3, None),
            causal=True,
            key_padding_mask=torch.ones(B, T_k, dtype=torch.bool),
            key_lengths=torch.tensor([3, 5], dtype=torch.int32),
            query_offset=torch.tensor([0, 2]),
            scale=1,
            backend="torch",
        )
    )
    assert o.shape == (B, H_q, T_q, D)


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
