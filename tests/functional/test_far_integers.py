"""Integers that int32 does not hold mean what they say: everything, nothing, or none alike."""

from functools import partial

import pytest
import torch

from fastattn import (
    KVCache,
    attention,
    attention_statistics,
    attention_varlen,
    checks,
    decode_attention,
)
from fastattn.cache.views import view_of_tensors
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.torch_backend import statistics

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, T_Q, T_K, D = 2, 2, 5, 9, 16
# What the low 32 bits of each say differs: 0, the lowest int32, and 3.
FAR = (2**33, 2**31, 2**32 + 3)
BACKENDS = ("triton", "torch")


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("far", "near"),
    [
        ({"window": 2**63}, {"causal": True}),
        ({"window": (2**64, 1)}, {"window": (None, 1)}),
        ({"window": (1, 0), "keep_first": 2**63}, {}),
        ({"stride": 2**64, "window": 2}, {"stride": T_K, "window": 2}),
        ({"causal": True, "prefix_lengths": 2**64}, {}),
    ],
    ids=str,
)
def test_integers_that_int64_does_not_hold(far, near, backend, device):
    q, k, v = make_qkv(B, H, H, T_Q, T_K, D, device=device)
    offset = torch.zeros(B, dtype=torch.int64, device=device)
    for place in ({}, {"query_offset": offset}):
        how = {"backend": backend, **place}
        assert torch.equal(attention(q, k, v, **how, **far), attention(q, k, v, **how, **near))


@pytest.mark.parametrize("backend", BACKENDS)
def test_document_ids_differ_in_every_bit(backend, device):
    ids = torch.tensor([[1, 2**32 + 1, 2**32 + 1, 2**63 - 1, -(2**32), 1]] * B, device=device)
    q, k, v = make_qkv(B, H, H, 6, 6, D, device=device)
    call = partial(attention, backend=backend)
    assert_matches_reference(call, q, k, v, documents=ids)
    assert_matches_reference(call, q, k, v, documents=(ids.int().abs(), ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["lengths", "starts", "new_lengths", "block_table"])
@pytest.mark.parametrize("x", FAR)
def test_decoding_with_far_integers(x, name, backend, device, unread):
    """Rows that are full, and that hold nothing; pages as far away as the last or the first."""
    k, v = torch.randn(2, B, H, T_K, D, device=device)
    table = tensor(1, 0).to(device)[:, None]
    near = {"lengths": tensor(T_K, T_K), "starts": tensor(0, 4), "new_lengths": tensor(2, 1)}
    near = {key: value.to(device) for key, value in near.items()} | {"block_table": table}
    far = dict(near)
    if name == "lengths":
        far[name], near[name] = tensor(x, -x).to(device), tensor(T_K, 0).to(device)
    elif name == "starts":
        far[name], near[name] = tensor(-x, x).to(device), tensor(0, T_K).to(device)
    elif name == "new_lengths":
        far[name], near[name] = tensor(x, -x).to(device), tensor(T_Q, 0).to(device)
    else:
        far[name] = tensor(x, -x).to(device)[:, None]
    q = torch.randn(B, H, T_Q, D, device=device)
    causal = name != "lengths"  # a query past all keys sees them all
    o = []
    for given in (far, near):
        new = given.pop("new_lengths")
        view = view_of_tensors(k, v, **given)
        o.append(decode_attention(q, view, new_lengths=new, causal=causal, backend=backend))
    assert torch.equal(*o)
    assert o[0].isfinite().all()


def test_a_cache_takes_far_starts_and_lengths():
    cache = KVCache(2, 1, 4, 2)
    cache.append(*torch.zeros(2, 2, 1, 3, 2))
    cache.set_starts(torch.tensor([2**32, -(2**32)]))
    assert cache.view().slot_positions().tolist() == [[-1, -1, -1], [0, 1, 2]]
    for length in (2**31, 2**33):
        cache.truncate(length)
        cache.truncate(torch.tensor([length, 2]))
    assert (cache.lengths.tolist(), cache.length_bound) == ([3, 2], 3)


def test_numbers_that_stand_too_far_are_refused():
    q, k, v = make_qkv(1, 1, 1, 2, 2, 8)
    for offset in (2**28 + 1, -(2**33)):
        with pytest.raises(
            ValueError, match=rf"query_offset must be within 2\*\*28 of 0, got {offset}"
        ):
            attention(q, k, v, causal=True, query_offset=offset)


def test_chunks_of_queries_at_the_farthest_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query of a chunk stands behind the one before it, past the last offset too."""
    q, k, _ = make_qkv(1, 1, 1, 4, 5, D, requires_grad=False)
    options = {"stride": 2, "query_offset": tensor(checks.FARTHEST), "backend": "torch"}
    whole = attention_statistics(q, k, **options)
    monkeypatch.setattr(statistics, "_SCORES", 1)
    torch.testing.assert_close(attention_statistics(q, k, **options), whole)


@pytest.mark.parametrize("values", [(-3, 5, 2**31 - 1), (7, 2, 99), (0, 2**33, -(2**40))])
def test_offsets_of_packed_sequences_lead_nowhere_else(values, device, unread):
    """The interpreter refuses accesses outside of all tensors."""
    wide = max(map(abs, values)) >= 2**31
    starts = torch.tensor(values, dtype=torch.int64 if wide else torch.int32, device=device)
    shapes = (20, 2, D), (18, 1, D), (18, 1, D)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    o = attention_varlen(q, k, v, starts, starts, causal=True, backend="triton")
    torch.autograd.grad(o.sum(), (q, k, v))
