"""NaN goes where arithmetic takes it: to the rows that see it, by every backend, and no further."""

import math
from functools import partial

import pytest
import torch

from fastattn import attention, attention_statistics, merge
from fastattn.testing import make_qkv

pytestmark = pytest.mark.usefixtures("one_thread")

B, H_Q, H_K, D = 2, 4, 2, 16
BACKENDS = ("triton", "torch")
# Fewer keys than a CPU's vectors have lanes, and more; queries, keys.
SIZES = [(1, 1), (3, 5), (1, 15), (4, 20)]
# The kernels serve all of these sizes by one tile.
CASES = [*((*x, "torch") for x in SIZES), (1, 15, "triton"), (4, 20, "triton")]


@pytest.mark.parametrize(("T_q", "T_k"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_s_kernel_has_nan_of_few_keys(dtype, T_q, T_k, device):
    """Generated calls have NaN in queries of all options; here are those that need no mask."""
    q, k, v = make_qkv(B, H_Q, H_K, T_q, T_k, D, dtype=dtype, device=device, requires_grad=False)
    q[:, 1, :, 3] = q[1, 3, -1] = math.nan
    places = tuple(torch.arange(T, device=device)[None].int() for T in (T_q, T_k))
    for mask in ({}, {"positions": places}, {"causal": True, "query_offset": 0}):
        o = attention(q, k, v, backend="torch", **mask)
        assert torch.equal(o.isnan(), q.isnan().any(-1, keepdim=True).expand_as(o)), mask
    lengths = torch.tensor([T_k, 0], device=device)  # of rows without keys, which are 0
    for how in ({}, {"return_lse": True}):
        o = attention(q, k, v, key_lengths=lengths, backend="torch", **how)
        o = o[0] if how else o
        assert o[0, 1].isnan().all() and not o[1].any()
    v[:, :, -1, 0] = math.nan  # in one column of rows that else are 0
    assert attention(q, k, v, backend="torch")[q.isnan().any(-1)].isnan().all()


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
