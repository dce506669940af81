"""Argument errors, but for those of scores: type, the argument named, what was got and expected."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import fastattn
from fastattn import checks
from fastattn.options import Options
from fastattn.testing import make_qkv

B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8
LONG = torch.int64


def qkv(**replaced: Any) -> dict[str, Any]:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D)
    return {"q": q, "k": k, "v": v, **replaced}


BAD = [
    (qkv(q=[1]), TypeError, r"q must be a torch\.Tensor, got list"),
    (qkv(k=None), TypeError, r"k must be a torch\.Tensor, got NoneType"),
    (qkv(q=torch.zeros(4, 3, 8)), ValueError, r"q must have 4 dimensions .*, got \(4, 3, 8\)"),
    (
        qkv(q=torch.zeros(B, H_q, T_q, D, dtype=LONG)),
        TypeError,
        r"q must be float16, .* got torch\.int64",
    ),
    (
        qkv(v=torch.zeros(B, H_k, T_k, D, dtype=torch.float16)),
        TypeError,
        r"v must have the dtype of q \(torch\.float32\), got torch\.float16",
    ),
    (
        qkv(k=torch.zeros(B, H_k, T_k, D, device="meta")),
        ValueError,
        r"k must be on the device of q \(cpu\), got meta",
    ),
    (
        qkv(k=torch.zeros(B + 1, H_k, T_k, D)),
        ValueError,
        r"k must have shape \[2, H_k, T_k, 8\] to match q, got \(3, 2, 5, 8\)",
    ),
    (qkv(k=torch.zeros(B, H_k, T_k, D + 1)), ValueError, r"k must have shape .* \(2, 2, 5, 9\)"),
    (
        qkv(v=torch.zeros(B, H_k, T_k + 1, D)),
        ValueError,
        r"v must have shape \[2, 2, 5, D_v\] to match k, got \(2, 2, 6, 8\)",
    ),
    (qkv(v=torch.zeros(B, H_k, T_k, 0)), ValueError, r"head dim of at least 1, got 8 and 0"),
    (
        qkv(k=torch.zeros(B, 3, T_k, D), v=torch.zeros(B, 3, T_k, D)),
        ValueError,
        r"k must have a number of heads that divides q's 4, got 3",
    ),
    (
        qkv(k=torch.zeros(B, 0, T_k, D), v=torch.zeros(B, 0, T_k, D)),
        ValueError,
        r"divides q's 4, got 0",
    ),
    (qkv(causal=1), TypeError, r"causal must be a bool, got int"),
    (qkv(deterministic=1), TypeError, r"deterministic must be a bool, got int"),
    (qkv(window=0), ValueError, r"window as an int counts visible keys, at least 1, got 0"),
    (qkv(window=True), TypeError, r"window must be an int or a tuple \(left, right\), got True"),
    (qkv(window=(1, 2, 3)), TypeError, r"window must be .* got \(1, 2, 3\)"),
    (qkv(window=(1.5, 0)), TypeError, r"window left must be an int or None, got 1\.5"),
    (qkv(window=(1, -1)), ValueError, r"window right counts neighbours, at least 0 .* got -1"),
    (
        qkv(key_padding_mask=torch.zeros(B, T_k)),
        TypeError,
        r"key_padding_mask must be a bool tensor \(True = attend\), got torch\.float32",
    ),
    (qkv(key_padding_mask=[[True]]), TypeError, r"key_padding_mask must be a bool .* got list"),
    (
        qkv(key_padding_mask=torch.zeros(B, T_q, dtype=torch.bool)),
        ValueError,
        r"key_padding_mask must have shape \[2, 5\], got \[2, 3\]",
    ),
    (
        qkv(key_padding_mask=torch.zeros(B, T_k, dtype=torch.bool, device="meta")),
        ValueError,
        r"key_padding_mask must be on cpu, got meta",
    ),
    (
        qkv(key_lengths=torch.zeros(B)),
        TypeError,
        r"key_lengths must be an int32 or int64 tensor, got torch\.float32",
    ),
    (qkv(key_lengths=[3, 4]), TypeError, r"key_lengths must be an int32 .* got list"),
    (
        qkv(key_lengths=torch.zeros(B + 1, dtype=LONG)),
        ValueError,
        r"key_lengths must have shape \[2\], got \[3\]",
    ),
    (
        qkv(key_lengths=torch.zeros(B, dtype=LONG, device="meta")),
        ValueError,
        r"key_lengths must be on cpu",
    ),
    (qkv(query_offset=1.0), TypeError, r"query_offset must be an int32 or int64 tensor, got float"),
    (
        qkv(query_offset=torch.zeros(B, 1, dtype=LONG)),
        ValueError,
        r"query_offset must have shape \[2\], got \[2, 1\]",
    ),
    (qkv(scale="1"), TypeError, r"scale must be a float, got str"),
    (qkv(scale=0.0), ValueError, r"scale must be positive and finite, got 0\.0"),
    (qkv(scale=-1.0), ValueError, r"scale must be positive and finite, got -1\.0"),
    (qkv(scale=math.inf), ValueError, r"scale must be positive and finite, got inf"),
    (qkv(scale=math.nan), ValueError, r"scale must be positive and finite, got nan"),
    (qkv(prefix_lengths=2), ValueError, "prefix_lengths makes keys visible .* needs causal=True"),
    (
        qkv(causal=True, prefix_lengths=-1),
        ValueError,
        "prefix_lengths must be at least 0, got -1",
    ),
    (
        qkv(causal=True, prefix_lengths=1.5),
        TypeError,
        "prefix_lengths must be an int32 or int64 tensor, got float",
    ),
    (
        qkv(causal=True, prefix_lengths=torch.zeros(3).long()),
        ValueError,
        r"prefix_lengths must have shape \[2\], got \[3\]",
    ),
    (qkv(keep_first=1.0), TypeError, "keep_first must be an int, got float"),
    (qkv(keep_first=-1, window=2), ValueError, "keep_first must be at least 0, got -1"),
    (
        qkv(keep_first=4, causal=True),
        ValueError,
        "keep_first=4 keeps keys that a window or stride hides; neither is given",
    ),
    (qkv(stride=0), ValueError, "stride must be at least 1, got 0"),
    (qkv(stride=True), TypeError, "stride must be an int, got bool"),
    (
        qkv(documents=torch.zeros(B, T_q, dtype=LONG)),
        ValueError,
        "documents must be a pair .* got one tensor for 3 queries and 5 keys",
    ),
    (
        qkv(documents=(torch.zeros(B, T_q, dtype=LONG),) * 2),
        ValueError,
        r"documents\[1\] must have shape \[2, 5\], got \[2, 3\]",
    ),
    (
        qkv(documents=(torch.zeros(B, T_q), torch.zeros(B, T_k))),
        TypeError,
        r"documents\[0\] must be an int32 or int64 tensor, got torch\.float32",
    ),
    (qkv(documents=(1, 2, 3)), TypeError, "documents must be ids or a pair of them, got 3"),
    (
        qkv(backend="cuda"),
        ValueError,
        "backend must be one of auto, hopper, triton, torch, got 'cuda'",
    ),
    (qkv(backend=np.array(["torch", "auto"])), ValueError, "backend must be one of .*, got array"),
]


@pytest.mark.parametrize("call", [fastattn.attention, fastattn.explain])
@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_arguments(call, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        call(**arguments)


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
