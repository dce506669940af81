"""A part of the heads computes what the whole does of them."""

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn import attention
from fastattn.kernels.launch import decode_splits
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw, to_device

B, H_q, H_k, T, D = 2, 4, 2, 24, 16
PARTS = ((0, 2), (2, 4))


@triton.jit
def by_head(b, h, q_pos, k_pos, table):
    return k_pos % (h + 2) != tl.load(table + h).to(tl.int32)


@triton.jit
def steeper(x, b, h, q_pos, k_pos, table):
    return x * tl.load(table + h) + h * (k_pos % 3)


@triton.jit
def steeper_grad(dx, x, b, h, q_pos, k_pos, table):
    return dx * tl.load(table + h)


TABLE = torch.tensor([1.0, 0.0, 2.0, 0.5])
SEED = torch.tensor([3 << 40 | 7, 1 << 33 | 5])
FUNCTIONS = {"score_mod": steeper, "score_mod_grad": steeper_grad, "mod_tensors": (TABLE,)}


def test_few_queries_of_a_part_of_the_heads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of decoding, which put rows of several heads in a tile."""
    monkeypatch.setattr(decode_splits, "MANY_KEYS", 1)
    options = to_device({"mask_mod": by_head, **FUNCTIONS}, device)
    q, k, v = (x.detach() for x in make_qkv(B, H_q, H_k, 2, T, D=D, device=device))
    assert fastattn.explain(q, k, v, backend="triton", **options).split_keys is not None
    whole = attention(q, k, v, backend="triton", **options)
    for n, (first, last) in enumerate(PARTS):
        own = (q[:, first:last], k[:, n : n + 1], v[:, n : n + 1])
        part = attention(*own, backend="triton", heads=(first, H_q), **options)
        torch.testing.assert_close(part, whole[:, first:last])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rows_of_a_batch_drop_what_they_do_of_the_whole(backend: str, device: str) -> None:
    q, k, v = (x.detach() for x in make_qkv(3, H_q, H_k, 9, D=D, device=device))
    options = {"dropout": 0.5, "dropout_seed": SEED.to(device), "backend": backend}
    whole = attention(q, k, v, **options)
    for row, heads in ((1, (2, H_q)), (2, (0, 2))):
        own = slice(*heads)
        kv = slice(heads[0] * H_k // H_q, -(-heads[1] * H_k // H_q))
        first = row * H_q + heads[0]
        part = attention(q[row:, own], k[row:, kv], v[row:, kv], heads=(first, H_q), **options)
        torch.testing.assert_close(part, whole[row:, own])


def test_dropout_keeps_what_it_keeps_of_the_whole() -> None:
    whole = fastattn.dropout_keep_mask(SEED, 0.5, B, H_q, 6, 9)
    for first, last in PARTS:
        part = fastattn.dropout_keep_mask(SEED, 0.5, B, last - first, 6, 9, heads=(first, H_q))
        assert torch.equal(part, whole[:, first:last])


def test_other_calls_compile_as_without() -> None:
    """heads changes nothing of a call without functions and dropout, or with all of the heads."""
    q, k, v = make_qkv(B, H_q, H_k, T, D=D)
    dropout = {"dropout": 0.3, "dropout_seed": SEED, "sinks": draw(H_q)}
    for heads, options in (((2, 9), {"causal": True}), ((0, H_q), dropout)):
        with_heads, without = (
            fastattn.functional.call_options.dense_options(q, k, v, **given)
            for given in ({**options, "heads": heads}, options)
        )
        assert with_heads == without


def test_functions_count_rows_by_themselves() -> None:
    q, k, v = make_qkv(1, H_q, H_k, 4, D=8)
    with pytest.raises(ValueError, match=r"below total=4 for score_mod, .*, got \(4, 4\)"):
        attention(q, k, v, heads=(4, 4), **FUNCTIONS)
