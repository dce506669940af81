"""NaN goes where arithmetic takes it: to the rows that see it, by every backend, and no further."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import attention, attention_statistics, decode_attention, merge
from fastattn.testing import make_qkv
from fastattn.testing.decoding import fill

pytestmark = pytest.mark.usefixtures("one_thread")

B, H_Q, H_K, D = 2, 4, 2, 16
BACKENDS = ("triton", "torch")
# Fewer keys than a CPU's vectors have lanes, and more; queries, keys.
SIZES = [(1, 1), (3, 5), (1, 15), (4, 20)]


def masks(T_q: int, T_k: int, device: str) -> dict[str, dict[str, Any]]:
    """Some of which leave rows without a key."""
    blind = torch.ones(T_q, T_k, dtype=torch.bool, device=device)
    blind[-1] = False
    return {
        "none": {},
        "causal": {"causal": True},
        "causal from the first": {"causal": True, "query_offset": 0},
        "window": {"window": (1, 0), "query_offset": 0},
        "blind": {"attn_mask": blind},
        "lengths": {"key_lengths": torch.tensor([T_k // 2, 0], device=device)},
        "before the keys": {"causal": True, "query_offset": -1},
    }


def assert_nan_exactly(o: Tensor, rows: Tensor, clean: Tensor) -> None:
    """o is NaN in these rows [B, H, T_q], and elsewhere what it is without any NaN."""
    assert o[rows].isnan().all()
    assert torch.equal(o[~rows], clean[~rows])


# The kernels serve all of these sizes by one tile.
CASES = [*((*x, "torch") for x in SIZES), (1, 15, "triton"), (4, 20, "triton")]


@pytest.mark.parametrize(("T_q", "T_k", "backend"), CASES)
def test_nan_in_a_query_reaches_its_row_where_it_sees_a_key(T_q, T_k, backend, device):
    # The kernels in one dtype each.
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes if backend == "torch" else dtypes[T_q > 1 :][:1]:
        q, k, v = make_qkv(
            B, H_Q, H_K, T_q, T_k, D, dtype=dtype, device=device, requires_grad=False
        )
        spoilt = q.clone()
        spoilt[:, 1, :, 3] = math.nan
        spoilt[1, 3, -1] = math.nan
        for name, mask in masks(T_q, T_k, device).items():
            call = partial(attention, k=k, v=v, backend=backend, return_lse=True, **mask)
            clean, clean_lse = call(q)
            o, lse = call(spoilt)
            rows = spoilt.isnan().any(-1) & (clean_lse > -math.inf)
            assert_nan_exactly(o, rows, clean)
            assert_nan_exactly(lse[..., None], rows, clean_lse[..., None])
            alone = attention(spoilt, k, v, backend=backend, **mask)
            assert alone[rows].isnan().all(), name
            assert alone[~rows].isfinite().all(), name
            assert (alone[clean_lse == -math.inf] == 0).all(), name


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(("T_q", "T_k", "backend"), CASES)
def test_nan_in_a_key_or_value_reaches_the_rows_that_see_it(T_q, T_k, name, backend, device):
    """And no other head or batch row."""
    q, k, v = make_qkv(B, H_Q, H_K, T_q, T_k, D, device=device, requires_grad=False)
    at = T_k // 2
    spoilt = {"k": k.clone(), "v": v.clone()}
    spoilt[name][0, 1, at:] = math.nan
    for mask in ({}, {"causal": True, "query_offset": 0}):
        clean = attention(q, k, v, backend=backend, **mask)
        o = attention(q, spoilt["k"], spoilt["v"], backend=backend, **mask)
        sees = torch.arange(T_q, device=device) >= (at if mask else 0)
        rows = torch.zeros(B, H_Q, T_q, dtype=torch.bool, device=device)
        rows[0, 2:] = sees
        assert o[rows].isnan().all()
        others = torch.ones_like(rows)
        adds_inf = backend == "torch" and device == "cuda"
        others[0, 2:] = ~sees if name == "k" and not adds_inf else False
        assert o[others].isfinite().all()
        assert torch.equal(o[1], clean[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_where_keys_are_hidden_reaches_nothing(bad, backend, device):
    T, reach = 20, 4
    q, k, v = make_qkv(B, H_Q, H_K, T, T, D, device=device, requires_grad=False)
    ahead = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    biases = {
        "attn_bias": (torch.zeros(B, 1, T, T, device=device), ahead),
        "relative_bias": (
            torch.zeros(H_Q, 2 * reach + 1, device=device),
            torch.arange(2 * reach + 1, device=device) < reach,
        ),
    }
    call = partial(attention, q, k, v, causal=True, backend=backend)
    for name, (x, hidden) in biases.items():
        assert torch.equal(call(**{name: x.masked_fill(hidden, bad)}), call(**{name: x}))


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("T", "causal"), [(5, False), (20, True)])
def test_traced_and_mapped_calls_of_torch_have_it_too(T, causal):
    q, k, v = make_qkv(B, H_Q, H_K, T, T, D, requires_grad=False)
    q[0, 1, 2] = math.nan
    call = partial(attention, causal=causal, backend="torch")
    expected = call(q, k, v).isnan()
    assert expected.any(-1).sum() == 1
    assert torch.equal(torch.compile(call, backend="aot_eager")(q, k, v).isnan(), expected)
    mapped = torch.func.vmap(call)(*(x.unsqueeze(1) for x in (q, k, v)))
    assert torch.equal(mapped.squeeze(1).isnan(), expected)


KINDS = [("contiguous", [7, 7, 7])]
KINDS += [(x, [7, 0, 4]) for x in ("contiguous", "left-padded", "pages-of-3", "ring", "int8")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "lengths"), KINDS)
def test_decoding_has_the_same_rule(kind, lengths, backend, device):
    k, v = torch.randn(2, 3, H_K, 7, D, device=device)
    cache = fill(kind, k, v, torch.tensor(lengths, dtype=torch.int32, device=device)).view
    q = torch.randn(3, H_Q, 2, D, device=device)
    spoilt = q.clone()
    spoilt[:, 1, 1, 0] = math.nan
    for splits in (1, 3):
        call = partial(decode_attention, cache=cache, backend=backend, num_splits=splits)
        clean, clean_lse = call(q, return_lse=True)
        rows = spoilt.isnan().any(-1) & (clean_lse > -math.inf)
        assert rows.any()
        o, lse = call(spoilt, return_lse=True)
        assert_nan_exactly(o, rows, clean)
        assert_nan_exactly(lse[..., None], rows, clean_lse[..., None])
        alone = call(spoilt)
        assert alone[rows].isnan().all()
        assert alone[~rows].isfinite().all()
        assert (alone[clean_lse == -math.inf] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_parts_keeps_it(backend, device):
    o = torch.randn(4, D, device=device)
    lse = torch.randn(4, device=device)
    spoilt, spoilt_lse = o.clone(), lse.clone()
    spoilt[0, 0] = spoilt_lse[1] = math.nan
    spoilt[2] = math.nan
    spoilt_lse[2] = -math.inf
    actual, found_lse = merge(spoilt, spoilt_lse, o, lse, backend=backend)
    assert actual.isnan().any(-1).tolist() == [True, True, False, False]
    assert actual[1].isnan().all() and not actual[0, 1:].isnan().any()
    assert found_lse.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_keep_it(backend, device):
    """In the entropy of the row, and in what the keys that it sees receive."""
    q, k, _ = make_qkv(B, H_Q, H_K, 4, 6, D, device=device, requires_grad=False)
    q[0, 1, 1] = math.nan
    q[1, 2, 0] = math.nan
    mask = {"causal": True, "query_offset": torch.tensor([0, -1], device=device)}
    actual = attention_statistics(q, k, backend=backend, **mask)
    assert actual.entropy.isnan().nonzero().tolist() == [[0, 1, 1]]
    assert actual.received.isnan().nonzero().tolist() == [[0, 1, 0], [0, 1, 1]]
    assert actual.entropy[1, 2, 0] == 0
