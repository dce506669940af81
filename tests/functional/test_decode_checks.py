"""Errors of decode_attention, its choice of a backend, and its behaviour under tracers."""

import numpy as np
import pytest
import torch
import triton

from fastattn import CacheView, KVCache, decode_attention, explain_decode, view_of_tensors
from fastattn.ops import decode, schema
from fastattn.options import Options


@triton.jit
def everything(b, h, q_pos, k_pos):
    return k_pos >= 0


def filled(device: str) -> KVCache:
    cache = KVCache(2, 2, 8, 16, device=device)
    k = torch.zeros(2, 2, 5, 16, device=device)
    cache.append(k, k, backend="torch")
    return cache


@pytest.fixture
def cache() -> KVCache:
    return filled("cpu")


Q = torch.zeros(2, 4, 1, 16)

REFUSED = [
    ({"q": 1.0}, TypeError, "q must be a torch.Tensor, got float"),
    ({"q": Q[0]}, ValueError, r"q must have shape \[2, H_q, T_q, 16\] to match the cache"),
    ({"q": Q[:1]}, ValueError, r"q must have shape \[2, H_q"),
    ({"q": Q[:, :3]}, ValueError, "a number of heads that the cache's 2 divide, got 3"),
    ({"q": Q.half()}, TypeError, "q must have the cache's dtype torch.float32, got torch.float16"),
    ({"q": Q.to("meta")}, ValueError, "q must be on cpu, got meta"),
    ({"cache": [1]}, TypeError, "cache must be a KVCache, a PagedKVCache or a CacheView, got list"),
    ({"cache": Q}, TypeError, r"cache must be .* got torch\.Tensor"),
    ({"cache": np.zeros(2)}, TypeError, r"cache must be .* got numpy\.ndarray"),
    ({"cache": KVCache}, TypeError, r"cache must be .* got type"),
    ({"new_lengths": torch.zeros(2)}, TypeError, "new_lengths must be an int32 or int64 tensor"),
    ({"new_lengths": torch.zeros(3).int()}, ValueError, r"new_lengths must have shape \[2\]"),
    ({"num_splits": 0}, ValueError, "num_splits must be at least 1, got 0"),
    ({"num_splits": 2.0}, TypeError, "num_splits must be an int"),
    ({"num_splits": 2, "batch_invariant": True}, ValueError, "give one of them"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant must be a bool, got int"),
    ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ({"key_lengths": 1}, TypeError, "takes no key_lengths: the cache knows the lengths"),
    ({"key_padding_mask": 1}, TypeError, "takes no key_padding_mask: the cache's starts"),
    ({"query_offset": 1}, TypeError, "takes no query_offset: the last query"),
    ({"prefix_lengths": 1}, TypeError, "takes no prefix_lengths: new tokens stand behind"),
    ({"documents": 1}, TypeError, "takes no documents: a row of a cache is one document"),
    ({"relative_keys": 1}, TypeError, "takes no relative_keys: there is no kernel"),
    ({"key2": 1}, TypeError, "takes no key2: a LatentCache holds the keys of both products"),
    ({"relative_query": 1}, TypeError, "takes no relative_query: there is no kernel"),
    ({"dropout": 0.1}, TypeError, "takes no dropout: there is no training"),
    ({"dropout_seed": 1}, TypeError, "takes no dropout_seed: there is no training"),
    ({"score_mod_grad": 1}, TypeError, "takes no score_mod_grad: there are no gradients"),
    ({"colour": 1}, TypeError, "takes no colour: there is no such argument"),
    ({"deterministic": True}, TypeError, "takes no deterministic: there are no gradients"),
    ({"attn_mask": 1}, TypeError, "attn_mask must be a bool tensor, got int"),
    ({"attn_mask": torch.zeros(1, 5)}, TypeError, "attn_mask must be bool .* got torch.float32"),
    ({"attn_mask": torch.ones(1, 4).bool()}, ValueError, "attn_mask must reach .* 5 positions"),
    ({"attn_mask": torch.ones(5).bool()}, ValueError, "attn_mask must reach over"),
    ({"attn_bias": torch.zeros(2, 5)}, ValueError, "attn_bias must broadcast to"),
    ({"attn_bias": torch.ones(1, 5).bool()}, TypeError, "attn_bias must be a float tensor"),
    ({"causal": 1}, TypeError, "causal must be a bool"),
    ({"window": 0}, ValueError, "window as an int counts visible keys"),
    ({"keep_first": 2}, ValueError, "keep_first=2 keeps keys that a window or stride hides"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must have shape \[4\]"),
    ({"mask_mod": print}, TypeError, "mask_mod must be a @triton.jit function"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_arguments_are_checked(
    change: dict, error: type[Exception], match: str, cache: KVCache
) -> None:
    good = {"q": Q, "cache": cache, "backend": "torch"}
    decode_attention(**good)
    with pytest.raises(error, match=match):
        decode_attention(**{**good, **change})


def test_gradients_are_refused(cache: KVCache) -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="decode_attention has no gradients"):
        decode_attention(q, cache)
    with torch.no_grad():
        assert not decode_attention(q, cache, backend="torch").requires_grad


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": 5}, r"window must be within the ring's of 4 keys, got 5"),
        ({"window": (None, 0)}, "window must be within the ring's"),
        ({"keep_first": 2}, "keep_first must be the ring's 1, got 2"),
        ({"stride": 2}, "stride: the keys that it shows are not kept by a ring"),
    ],
)
def test_a_ring_shows_what_it_keeps(options: dict, match: str) -> None:
    ring = KVCache(1, 1, 6, 16, window=4, keep_first=1)
    k = torch.zeros(1, 1, 9, 16)
    ring.append(k, k, backend="torch")
    decode_attention(Q[:1, :1], ring, backend="torch", window=3, keep_first=1)
    with pytest.raises(ValueError, match=match):
        decode_attention(Q[:1, :1], ring, **options)
    with pytest.raises(ValueError, match="q must have at most 2 tokens, as the ring keeps"):
        decode_attention(Q[:1, :1].expand(1, 1, 3, 16), ring)


def tensors(**change: object) -> CacheView:
    pages = torch.zeros(2, 1, 4, 16)
    arguments = {"k": pages, "v": pages, "lengths": torch.tensor([2, 3]), **change}
    return view_of_tensors(**arguments)


INTS = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"k": torch.zeros(2, 4, 16)}, ValueError, r"k must have 4 dimensions"),
        ({"k": torch.zeros(2, 1, 4, 16).int()}, TypeError, "k must be a float tensor, int8 or"),
        ({"window": "a"}, TypeError, "window must be an int, got str"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 3, "keep_first": 2}, ValueError, r"k must have a slot for each .* 5 .* got 4"),
        ({"batch_index": INTS + 2}, ValueError, "batch_index must hold rows from 0 to 1, got 2"),
        ({"batch_index": INTS - 1}, ValueError, "batch_index must hold rows from 0 to 1, got -1"),
        ({"length_bound": -1}, ValueError, "length_bound must be at least 0, got -1"),
        ({"dtype": "bf16"}, TypeError, "dtype must be a floating dtype, got 'bf16'"),
        ({"v": torch.zeros(2, 1, 5, 16)}, ValueError, "v must be torch.float32 .* as k is"),
        ({"v": torch.zeros(2, 1, 4, 16).half()}, ValueError, "v must be torch.float32"),
        (
            {"k": torch.zeros(2, 1, 4, 32)[..., ::2]},
            ValueError,
            "k must have rows whose numbers follow",
        ),
        ({"k_scale": torch.zeros(2, 1, 4)}, ValueError, "k_scale goes with int8 and float8"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths must be an int32 or int64 tensor"),
        ({"lengths": INTS[None]}, ValueError, "lengths must have shape"),
        ({"lengths": torch.zeros(3).int()}, ValueError, "k must have a page for each of 3 rows"),
        ({"block_table": INTS}, ValueError, "block_table must have shape"),
        ({"block_table": 1}, TypeError, "block_table must be an int32"),
        ({"starts": torch.zeros(3).int()}, ValueError, "starts must have shape"),
        ({"batch_index": INTS[None]}, ValueError, "batch_index must have shape"),
        ({"window": 2, "starts": INTS}, ValueError, "window: a ring has neither"),
        ({"keep_first": 2}, ValueError, "keep_first=2 keeps"),
    ],
)
def test_tensors_are_checked(change: dict, error: type[Exception], match: str) -> None:
    tensors()
    with pytest.raises(error, match=match):
        tensors(**change)


def test_codes_need_scales() -> None:
    codes = torch.zeros(2, 1, 4, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k_scale must be given, as k is torch.int8"):
        tensors(k=codes, v=codes)
    wide = torch.zeros(2, 1, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="k_scale must be a float32 tensor"):
        tensors(k=codes, v=codes, k_scale=wide, v_scale=wide)
    scale = torch.zeros(2, 1, 4)
    assert tensors(k=codes, v=codes, k_scale=scale, v_scale=scale).dtype == torch.bfloat16


def test_the_choice_is_explained(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = Q.to(device), filled(device)
    assert explain_decode(q, cache, backend="torch").reasons == {
        "triton": 'backend "torch" was asked for'
    }
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    assert explain_decode(q, cache).backend == "torch"
    monkeypatch.delenv("FASTATTN_BACKEND")
    wide = KVCache(1, 1, 4, 16, dtype=torch.float64, device=device)
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float64, device=device)
    assert "float64" in explain_decode(q, wide).reasons["triton"]
    with pytest.raises(ValueError, match=r'backend "triton" cannot serve this call: q is float64'):
        decode_attention(q, wide, backend="triton")


def op_arguments(view: CacheView, q: torch.Tensor) -> tuple:
    return (
        q, view.k, view.v, view.k_scale, view.v_scale, view.block_table, view.lengths, view.starts,
        None, view.batch_index, view.keep_first, None, False,
    )  # fmt: skip


def test_the_op_has_a_fake_and_a_schema(device: str) -> None:
    options = Options(scale=0.25, causal=True)
    arguments = (*op_arguments(filled(device).view(), Q.to(device)), *schema.flat(options))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(decode.decode_forward.op, arguments, test_utils=tests)


def test_traced_calls_give_the_same(device: str) -> None:
    q, cache = torch.randn(2, 4, 1, 16, device=device), filled(device)

    def step(q: torch.Tensor) -> torch.Tensor:
        return decode_attention(q, cache.view(), backend="triton", softcap=2.0)

    traced = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(traced(q), step(q))
