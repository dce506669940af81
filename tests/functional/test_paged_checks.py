"""Errors of attention_paged, each of which names the argument."""

from typing import Any

import pytest
import torch
import triton

from fastattn import KVCache, attention_paged, explain_paged, view_of_tensors


@triton.jit
def everything(b, h, q_pos, k_pos):
    return k_pos >= 0


PAGES = torch.zeros(6, 2, 4, 16)
TABLE = torch.tensor([[0, 1, 2], [3, 4, 9]])
Q = torch.zeros(4, 4, 16)
INTS = torch.zeros(2, dtype=torch.int32)


def good() -> dict[str, Any]:
    cache = (PAGES, PAGES, TABLE, torch.tensor([9, 7]))
    return {"q": Q, "cache": cache, "cu_seqlens_q": torch.tensor([0, 3, 4]), "backend": "torch"}


def cache_with(**change: Any) -> tuple[Any, ...]:
    names = ("k", "v", "table", "lengths")
    return tuple(change.get(name, x) for name, x in zip(names, good()["cache"], strict=True))


RING = KVCache(2, 2, 6, 16, window=4)
TREE = torch.ones(4, 3, dtype=torch.bool)
FLAT = torch.ones(10, dtype=torch.bool)

REFUSED = [
    ({"q": 1.0}, TypeError, "q must be a torch.Tensor, got float"),
    ({"q": Q[0]}, ValueError, r"q must have shape \[total, H_q, 16\], got \[4, 16\]"),
    ({"q": Q[:, :3]}, ValueError, "a number of heads that the cache's 2 divide, got 3"),
    ({"q": Q.half()}, TypeError, "q must have the cache's dtype torch.float32, got torch.float16"),
    ({"q": Q.to("meta")}, ValueError, "q must be on cpu, got meta"),
    ({"cache": PAGES}, TypeError, r"cache must be .* got torch\.Tensor"),
    ({"cache": (PAGES, PAGES)}, TypeError, r"cache must be \(k_pages, .* got one of 2"),
    ({"cache": RING}, ValueError, "cache must keep all tokens of its rows, got a ring"),
    ({"cache": cache_with(table=TABLE.to("meta"))}, ValueError, "block_table must be on cpu"),
    ({"cache": cache_with(table=TABLE[:1])}, ValueError, r"block_table must have shape \[2, 3\]"),
    (
        {"cache": cache_with(lengths=torch.tensor([13, 7]))},
        ValueError,
        r"lengths must be from 0 to 12, the slots of a row's 3 pages, got 13 for row 0",
    ),
    ({"cache": cache_with(lengths=torch.tensor([9, -1]))}, ValueError, "got -1 for row 1"),
    (
        {"cache": cache_with(lengths=torch.tensor([9, 9]))},
        ValueError,
        "block_table must hold numbers of pages from 0 to 5, got 9 for page 2 of row 1",
    ),
    ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must be an int32 or int64 tensor"),
    ({"cu_seqlens_q": INTS}, ValueError, r"cu_seqlens_q must have shape \[3\], got \[2\]"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 5])}, ValueError, "must run from 0 to at most 4"),
    ({"cu_seqlens_q": torch.tensor([1, 3, 4])}, ValueError, "must run from 0 to"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 1])}, ValueError, "cu_seqlens_q must not fall"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q must be at least 3, the new tokens of row 0"),
    ({"max_seqlen_q": 2.0}, TypeError, "max_seqlen_q must be an int"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant must be a bool, got int"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ({"out": Q.half()}, TypeError, "out must have the dtype of q, torch.float32"),
    ({"out": Q[:3]}, ValueError, r"out must have shape \[4, 4, 16\], got \[3, 4, 16\]"),
    ({"out": Q[:1].expand(4, 4, 16)}, ValueError, "out must be a plain tensor of its own memory"),
    ({"out": Q.mT.contiguous().mT}, ValueError, "whose last dim is contiguous"),
    ({"tree_mask": TREE.int()}, TypeError, "tree_mask must be a bool tensor, got torch.int32"),
    ({"tree_mask": TREE[:3]}, ValueError, r"tree_mask must have shape \[4, W\], got \[3, 3\]"),
    ({"tree_mask": TREE[:, :2]}, ValueError, "a column for each of the 3 new tokens of row 0"),
    ({"tree_mask": (FLAT,)}, TypeError, r"tree_mask must be \(flat, starts\), got a tuple of 1"),
    ({"tree_mask": (TREE, INTS)}, ValueError, r"tree_mask\[0\] must have shape \[M\]"),
    ({"tree_mask": (FLAT, INTS + 10)}, ValueError, "must leave row 0 its 3 x 3 of 10 elements"),
    ({"tree_mask": (FLAT, INTS[:1])}, ValueError, r"tree_mask\[1\] must have shape \[2\]"),
    ({"attn_mask": TREE}, TypeError, "takes no attn_mask: mask_mod computes a mask"),
    ({"attn_bias": TREE}, TypeError, "takes no attn_bias: relative_bias and score_mod compute"),
    ({"key_lengths": INTS}, TypeError, "takes no key_lengths: the cache knows the lengths"),
    ({"dropout": 0.1}, TypeError, "takes no dropout: there is no training from a cache"),
    ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, "alibi_slopes must have shape"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must have shape \[4\]"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_arguments_are_checked(change: dict, error: type[Exception], match: str) -> None:
    attention_paged(**good())
    with pytest.raises(error, match=match):
        attention_paged(**{**good(), **change})


def test_gradients_are_refused() -> None:
    given = {**good(), "q": Q.clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="attention_paged has no gradients"):
        attention_paged(**given)
    with torch.no_grad():
        assert not attention_paged(**given).requires_grad


def test_the_choice_is_explained(device: str) -> None:
    given = {name: x.to(device) for name, x in good().items() if isinstance(x, torch.Tensor)}
    cache = tuple(x.to(device) for x in good()["cache"])
    forced = explain_paged(**given, cache=cache, backend="triton")
    assert (forced.backend, forced.forced) == ("triton", True)
    whole = {**given, "cache": cache, "backend": "torch"}
    assert explain_paged(**whole).reasons == {"triton": 'backend "torch" was asked for'}
    with pytest.raises(ValueError, match="cannot serve this call"):
        explain_paged(**given, cache=cache, backend="hopper")


@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (1.0, TypeError, "k_scale must be a float32 tensor, got float"),
        (torch.ones(3), ValueError, r"k_scale must have shape \[2\], got \[3\]"),
        (torch.ones(2, device="meta"), ValueError, "k_scale must be on cpu, got meta"),
        (torch.ones(6, 2, 5), ValueError, r"k_scale must have shape \[6, 2, 4\]"),
    ],
)
def test_scales_are_checked(scale: Any, error: type[Exception], match: str) -> None:
    codes = PAGES.to(torch.int8)
    with pytest.raises(error, match=match):
        view_of_tensors(codes, codes, INTS, k_scale=scale, v_scale=torch.ones(()))
