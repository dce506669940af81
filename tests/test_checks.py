"""Argument errors of dense calls: the type, the argument named, what was got and expected."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton

import fastattn
from fastattn import checks
from fastattn.options import Options
from fastattn.testing import make_qkv

B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8
ones, yes = torch.ones, torch.ones(1, 1, dtype=torch.bool)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


@triton.jit
def keep_all(b, h, i, j):
    return i == i


@triton.jit
def keep_two(b, h, i, j, one, other):
    return i == i


@triton.jit
def same(x, b, h, i, j):
    return x


KEYS, LEARNS = ones(1, 3, D), ones(H_q, requires_grad=True)
Q2 = ones(B, H_q, T_q, 6)
POSITIONS = tuple(torch.arange(T, dtype=torch.int32)[None] for T in (T_q, T_k))
TABLES = {"mask_mod": keep_all, "mod_tensors": (ones(2),)}

# What is changed in a call, and what its message names.
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"q": [1]}, r"q must be a torch\.Tensor, got list"),
    ({"k": None}, r"k must be a torch\.Tensor, got NoneType"),
    ({"q": ints(B, H_q, T_q, D)}, r"q must be float16, .* got torch\.int64"),
    ({"v": ones(B, H_k, T_k, D).half()}, r"v must have the dtype of q .* got torch\.float16"),
    ({"causal": 1}, "causal must be a bool, got int"),
    ({"deterministic": 1}, "deterministic must be a bool, got int"),
    ({"window": True}, r"window must be an int or a tuple \(left, right\), got True"),
    ({"window": (1, 2, 3)}, r"window must be .* got \(1, 2, 3\)"),
    ({"window": (1.5, 0)}, r"window left must be an int or None, got 1\.5"),
    ({"key_padding_mask": ones(B, T_k)}, r"key_padding_mask must be a bool .* got torch\.float32"),
    ({"key_padding_mask": [[True]]}, "key_padding_mask must be a bool .* got list"),
    ({"key_lengths": ones(B)}, r"key_lengths must be an int32 or int64 tensor, got torch\.float32"),
    ({"key_lengths": [3, 4]}, "key_lengths must be an int32 .* got list"),
    ({"query_offset": 1.0}, "query_offset must be an int32 or int64 tensor, got float"),
    ({"scale": "1"}, "scale must be a float, got str"),
    ({"causal": True, "prefix_lengths": 1.5}, "prefix_lengths must be an int32 .* got float"),
    ({"keep_first": 1.0}, "keep_first must be an int, got float"),
    ({"stride": True}, "stride must be an int, got bool"),
    ({"documents": (ones(B, T_q), ones(B, T_k))}, r"documents\[0\] must be an int32 .*float32"),
    ({"documents": (1, 2, 3)}, "documents must be ids or a pair of them, got 3"),
    ({"attn_mask": ints(T_q, T_k)}, r"attn_mask must be a bool .* or float tensor, got .*int64"),
    ({"attn_bias": yes}, r"attn_bias must be a float tensor, got torch\.bool"),
    ({"softcap": ones(1)}, r"softcap must be a float, got a tensor of .* \[1\]"),
    ({"alibi_slopes": ones(H_q).double()}, r"alibi_slopes must be a float32 .* got torch\.float64"),
    ({"relative_bias": [0.0]}, "relative_bias must be a float tensor, got list"),
    ({"relative_keys": KEYS.double()}, r"relative_keys must have the dtype of q .* got .*float64"),
    ({"relative_keys": KEYS, "relative_query": ones(1).half()}, "relative_query .* the dtype of q"),
    ({"query2": [1.0], "key2": ones(1)}, "query2 must have the dtype of q .* got list"),
    ({"query2": Q2, "key2": Q2.half()}, r"key2 must have the dtype of q .* got torch.float16"),
    ({"sinks": ones(H_q).long()}, r"sinks must be a float tensor, got torch\.int64"),
    ({"dropout": "half"}, "dropout must be a float, got str"),
    ({"dropout": ones(2), "heads": (0, H_q)}, "dropout must be a float, got a tensor"),
    ({"dropout": ones(2), "positions": POSITIONS}, "dropout must be a float, got a tensor"),
    ({"dropout": 0.1, "dropout_seed": 7}, "dropout_seed must be an int64 tensor, got int"),
    ({"score_mod": np.zeros(2), "heads": (0, H_q)}, r"score_mod must be a @triton\.jit function"),
    ({"mask_mod": lambda b, h, i, j: True}, r"mask_mod must be a @triton\.jit .* got <lambda>"),
    ({"mask_mod": 3}, r"mask_mod must be a @triton\.jit function, got int"),
    ({**TABLES, "mod_tensors": [ones(2)]}, "mod_tensors must be a tuple of tensors, got list"),
    ({**TABLES, "mod_tensors": (2,)}, r"mod_tensors\[0\] must be a torch\.Tensor, got int"),
]
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"q": ones(4, 3, 8)}, r"q must have 4 dimensions .*, got \(4, 3, 8\)"),
    ({"k": ones(B, H_k, T_k, D, device="meta")}, r"k must be on the device of q \(cpu\), got meta"),
    ({"k": ones(3, H_k, T_k, D)}, r"k must have shape \[2, H_k, T_k, 8\] .*, got \(3, 2, 5, 8\)"),
    ({"k": ones(B, H_k, T_k, D + 1)}, r"k must have shape .* \(2, 2, 5, 9\)"),
    ({"v": ones(B, H_k, 6, D)}, r"v must have shape .* to match k, got \(2, 2, 6, 8\)"),
    ({"v": ones(B, H_k, T_k, 0)}, "head dim of at least 1, got 8 and 0"),
    ({x: ones(B, 3, T_k, D) for x in "kv"}, "k must have a number .* that divides q's 4, got 3"),
    ({x: ones(B, 0, T_k, D) for x in "kv"}, "divides q's 4, got 0"),
    ({"window": 0}, "window as an int counts visible keys, at least 1, got 0"),
    ({"window": (1, -1)}, "window right counts neighbours, at least 0 .* got -1"),
    ({"key_padding_mask": yes}, r"key_padding_mask must have shape \[2, 5\], got \[1, 1\]"),
    ({"key_padding_mask": yes.expand(B, T_k).to("meta")}, "key_padding_mask .* on cpu, got meta"),
    ({"key_lengths": ints(B + 1)}, r"key_lengths must have shape \[2\], got \[3\]"),
    ({"key_lengths": ints(B).to("meta")}, "key_lengths must be on cpu"),
    ({"query_offset": ints(B, 1)}, r"query_offset must have shape \[2\], got \[2, 1\]"),
    *(({"scale": x}, f"scale must be positive and finite, got {x}") for x in (0.0, -1.0, math.inf)),
    ({"scale": math.nan}, "scale must be positive and finite, got nan"),
    ({"prefix_lengths": 2}, "prefix_lengths makes keys visible .* needs causal=True"),
    ({"causal": True, "prefix_lengths": -1}, "prefix_lengths must be at least 0, got -1"),
    ({"causal": True, "prefix_lengths": ints(3)}, r"prefix_lengths must have .* \[2\], got \[3\]"),
    ({"keep_first": -1, "window": 2}, "keep_first must be at least 0, got -1"),
    ({"keep_first": 4, "causal": True}, "keep_first=4 keeps keys .*; neither is given"),
    ({"stride": 0}, "stride must be at least 1, got 0"),
    ({"documents": ints(B, T_q)}, "documents must be a pair .* tensor for 3 queries and 5 keys"),
    ({"documents": (ints(B, T_q),) * 2}, r"documents\[1\] must have shape \[2, 5\], got \[2, 3\]"),
    ({"backend": "cuda"}, "backend must be one of auto, hopper, triton, torch, got 'cuda'"),
    ({"backend": np.array(["torch", "auto"])}, "backend must be one of .*, got array"),
    ({"attn_mask": yes[0]}, r"attn_mask must have 2 to 4 dimensions, got \[1\]"),
    ({"attn_mask": yes.expand(3, T_q, T_k)}, r"attn_mask .* = \[2, 4, 3, 5\], got \[3, 3, 5\]"),
    ({"attn_mask": yes.to("meta")}, "attn_mask must be on cpu, got meta"),
    ({"attn_mask": ones(1, 1), "attn_bias": ones(1, 1)}, "attn_mask is a float .* is given too"),
    ({"attn_mask": ones(T_q, 6), "causal": True}, r"attn_mask must broadcast .* got \[3, 6\]"),
    ({"attn_bias": ones(T_q + 1, T_k)}, r"attn_bias must broadcast to .* got \[4, 5\]"),
    ({"softcap": 0.0}, "softcap must be positive and finite, got 0"),
    ({"alibi_slopes": ones(H_k)}, r"alibi_slopes must have shape \[4\] or \[2, 4\], got \[2\]"),
    ({"alibi_slopes": LEARNS}, "alibi_slopes have no gradient, .*; relative_bias is a bias that"),
    ({"relative_bias": ones(H_q, 4)}, r"relative_bias must .* \[4, 2 R \+ 1\], got \[4, 4\]"),
    ({"relative_keys": ones(3, 3, D)}, r"relative_keys must have .* 1, 2, 4, got \[3, 3, 8\]"),
    ({"relative_query": ones(1)}, "relative_query is multiplied by relative_keys, which is not"),
    ({"relative_keys": KEYS, "relative_query": ones(1)}, r"relative_query .*3, 8\], got \[1\]"),
    ({"query2": Q2}, "query2 is multiplied by key2, which is not given"),
    ({"key2": Q2}, "key2 is multiplied by query2, which is not given"),
    ({"query2": ones(1), "key2": Q2}, r"query2 must have shape \[2, 4, 3, 1\], got \[1\]"),
    ({"query2": Q2, "key2": ones(B, 1, T_k, 7)}, r"key2 must have shape \[2, 1, 5, 6\], got"),
    ({"query2": Q2, "key2": ones(B, 3, T_k, 6)}, r"key2 must have .* that divides k's 2, got 3"),
    ({"query2": Q2[..., :0], "key2": Q2}, "query2 must have columns"),
    ({"sinks": ones(H_k)}, r"sinks must have shape \[4\], got \[2\]"),
    *(({"dropout": x}, rf"dropout must be in \[0, 1\), got {x}") for x in (1.0, -0.1)),
    ({"dropout": 0.1, "dropout_seed": ints(3)}, r"dropout_seed must have shape \[2\], got \[3\]"),
    (TABLES, r"mask_mod must take \(b, h, q_pos, k_pos\) and 1 mod_tensors, got \(b, h, i, j\)"),
    ({"score_mod": keep_all}, r"score_mod must take \(x, b, .* 0 mod_tensors, got \(b, h, i, j\)"),
    ({"score_mod": same}, "score_mod needs score_mod_grad where an input requires grad"),
    ({"score_mod": same, "score_mod_grad": same}, r"score_mod_grad must take \(dx, x, b, h, q_pos"),
    ({"score_mod_grad": same}, "score_mod_grad is the gradient of score_mod, which is not given"),
    ({"mod_tensors": (ones(2),)}, "mod_tensors are read by mask_mod or score_mod; neither is"),
    ({**TABLES, "mod_tensors": (ones(2, 2).T,)}, r"mod_tensors\[0\] .* contiguous, .* \[1, 2\]"),
    ({**TABLES, "mod_tensors": (ones(2),) * 9}, "mod_tensors must be at most 8, got 9"),
    ({"mask_mod": keep_two, "mod_tensors": (ones(2), LEARNS)}, r"mod_tensors\[1\] has no grad"),
]
BAD = [(TypeError, *row) for row in TYPES] + [(ValueError, *row) for row in VALUES]


def qkv(**replaced: Any) -> dict[str, Any]:
    return {**dict(zip("qkv", make_qkv(B, H_q, H_k, T_q, T_k, D), strict=True)), **replaced}


@pytest.mark.parametrize("call", [fastattn.attention, fastattn.explain])
@pytest.mark.parametrize(("error", "changed", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_arguments(call, error, changed, message) -> None:
    with pytest.raises(error, match=message):
        call(**qkv(**changed))


def test_functions_alone_and_tables_that_learn_serve_without_gradients() -> None:
    with torch.no_grad():
        o = fastattn.attention(**qkv(score_mod=same, backend="torch"))
        plain, _ = fastattn.attention(**qkv(backend="torch", return_lse=True))
        tables = {"mask_mod": keep_two, "mod_tensors": (LEARNS, ones(2))}
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
