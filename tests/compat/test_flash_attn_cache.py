"""flash-attn's caches, written and read in place, against the naive reference."""

import numpy as np
import pytest
import torch
from calls_of_flash_attn import CASES, case, check, offsets

from fastattn.compat import flash_attn
from fastattn.rotary import apply_rotary, rotary_tables

pytestmark = pytest.mark.usefixtures("on_torch_without_a_gpu")


S, D = 12, 8


@pytest.fixture
def caches(draw):
    return draw(3, S, 2, D), draw(3, S, 2, D)


def lengths_of(numbers, device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", [*CASES][:-1])
def test_cache_read(name, caches, draw, device):
    theirs, ours = case(name, device)
    q, lengths = draw(3, 2, 4, D), lengths_of([5, 12, 7], device)
    k_cache, v_cache = caches
    found = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True, **theirs
    )
    check(found, q, k_cache, v_cache, key_lengths=lengths, query_offset=lengths - 2, **ours)
    assert lengths.tolist() == [5, 12, 7]


def test_cache_lengths_as_a_number_and_by_default(caches, draw):
    q, (k_cache, v_cache) = draw(3, 1, 4, D), caches
    o = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6)
    check(o, q, k_cache[:, :6], v_cache[:, :6])
    check(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache), q, k_cache, v_cache)


def test_numbers_of_numpy_and_of_tensors(caches, draw):
    q, (k_cache, v_cache) = draw(3, 1, 4, D), caches
    found = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=np.int64(6),
        softmax_scale=np.float32(0.3),
        causal=np.bool_(True),
        window_size=torch.tensor([3, -1]),
        num_splits=np.int32(0),
    )
    check(found, q, k_cache[:, :6], v_cache[:, :6], scale=0.3, window=(3, None))


def turned(x, positions, tables, interleaved):
    cos, sin = (t[positions.long()] for t in tables)
    style = "interleaved" if interleaved else "half"
    return apply_rotary(x.transpose(1, 2), cos, sin, style=style).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_cache_append_with_rotary(interleaved, causal, caches, draw, device):
    k_cache, v_cache = caches
    q, k, v = draw(3, 2, 4, D), draw(3, 2, 2, D), draw(3, 2, 2, D)
    lengths = lengths_of([5, 10, 0], device)
    tables = rotary_tables(S, 6, device=device)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    steps = torch.arange(2, device=device)
    places = lengths[:, None] + steps
    rotated_k = turned(k, places, tables, interleaved)
    rotated_q = turned(q, places if causal else places - steps, tables, interleaved)
    for b in range(3):
        wanted_k[b, places[b].long()], wanted_v[b, places[b].long()] = rotated_k[b], v[b]
    o = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, lengths, causal=causal, rotary_interleaved=interleaved
    )
    torch.testing.assert_close(k_cache, wanted_k)
    assert torch.equal(v_cache, wanted_v) and lengths.tolist() == [5, 10, 0]
    options = {"key_lengths": lengths + 2, "query_offset": lengths, "causal": causal}
    check(o, rotated_q, wanted_k, wanted_v, **options)


def test_cache_rows_by_index(caches, draw, device):
    k_cache, v_cache = caches
    q, k, v = draw(2, 1, 4, D), draw(2, 1, 2, D), draw(2, 1, 2, D)
    rows, lengths = lengths_of([2, 0], device), lengths_of([3, 8], device)
    before = k_cache[1].clone()
    o = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows, causal=True
    )
    assert torch.equal(k_cache[2, 3], k[0, 0]) and torch.equal(v_cache[0, 8], v[1, 0])
    assert torch.equal(k_cache[1], before)
    keys, values = k_cache[[2, 0]], v_cache[[2, 0]]
    check(o, q, keys, values, key_lengths=lengths + 1)


def test_cache_rows_that_start_late(caches, draw, device):
    """Nothing before a row's start is seen; rotations count from the start of the cache."""
    k_cache, v_cache = caches
    q, k, v = draw(3, 1, 4, D), draw(3, 1, 2, D), draw(3, 1, 2, D)
    lengths, first = lengths_of([5, 11, 4], device), lengths_of([2, 0, 3], device)
    tables = rotary_tables(S, D, device=device)
    positions = lengths[:, None]
    k_cache[0, :2] = v_cache[0, :2] = float("nan")
    o = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, lengths, cache_leftpad=first, causal=True
    )
    rotated = turned(k, positions, tables, True)
    for b, n in enumerate([5, 11, 4]):
        torch.testing.assert_close(k_cache[b, n], rotated[b, 0])
    rotated_q = turned(q, positions, tables, True)
    for b, (start, n) in enumerate([(2, 6), (0, 12), (3, 5)]):
        check(
            o[b : b + 1],
            rotated_q[b : b + 1],
            k_cache[b : b + 1, start:n],
            v_cache[b : b + 1, start:n],
        )


@pytest.fixture
def paged(draw, device):
    """Pages [P, 4, 2, D], a table of shuffled pages, and the same rows in order."""
    k_pages, v_pages = draw(10, 4, 2, D), draw(10, 4, 2, D)
    table = torch.tensor([[7, 1, 4], [0, 9, 2]], dtype=torch.int32, device=device)
    return k_pages, v_pages, table


def in_order(pages, table):
    return pages[table.long()].flatten(1, 2)


@pytest.mark.parametrize("spelling", ["block_table", "page_table"])
def test_paged_cache(spelling, paged, draw, device):
    k_pages, v_pages, table = paged
    q, k, v = draw(2, 3, 4, D), draw(2, 3, 2, D), draw(2, 3, 2, D)
    lengths = lengths_of([3, 9], device)
    o, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_pages,
        v_pages,
        k,
        v,
        cache_seqlens=lengths,
        causal=True,
        return_softmax_lse=True,
        **{spelling: table},
    )
    keys, values = in_order(k_pages, table), in_order(v_pages, table)
    assert torch.equal(keys[0, 3:6], k[0]) and torch.equal(values[1, 9:12], v[1])
    options = {"key_lengths": lengths + 3, "query_offset": lengths, "causal": True}
    check((o, lse), q, keys, values, **options)


def test_varlen_over_pages(paged, draw, device):
    k_pages, v_pages, table = paged
    q = draw(5, 4, D)
    cu_q, cu_k = offsets((4, 1), device), offsets((6, 11), device)
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        k_pages,
        v_pages,
        cu_q,
        cu_k,
        4,
        11,
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    keys, values = in_order(k_pages, table), in_order(v_pages, table)
    for n, (rows, length) in enumerate([(slice(0, 4), 6), (slice(4, 5), 11)]):
        part = (o[None, rows].contiguous(), lse[None, :, rows])
        check(
            part, q[None, rows], keys[n : n + 1, :length], values[n : n + 1, :length], causal=True
        )
    used = cu_k.diff()
    given = {"seqused_k": used, "max_seqlen_q": 4, "causal": True, "page_table": table}
    again = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, return_lse=True, **given)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)


def test_kernels_read_and_write_the_cache(caches, draw, device, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    k_cache, v_cache = (x[:2].clone() for x in caches)
    q, k, v = draw(2, 1, 4, D), draw(2, 1, 2, D), draw(2, 1, 2, D)
    lengths, tables = lengths_of([4, 9], device), rotary_tables(S, D, device=device)
    o = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *tables, lengths, causal=True)
    torch.testing.assert_close(k_cache[0, 4:5], turned(k, lengths[:, None], tables, True)[0])
    assert torch.equal(v_cache[1, 9], v[1, 0])
    rotated_q = turned(q, lengths[:, None], tables, True)
    check(o, rotated_q, k_cache, v_cache, key_lengths=lengths + 1)


CONTRADICTIONS = {
    "k-alone": ({"v": None}, "k and v must be given together"),
    "no-lengths": ({"cache_seqlens": None}, "cache_seqlens must be given with k and v"),
    "one-table": ({"rotary_cos": torch.ones(12, 4)}, "rotary_cos and rotary_sin must be given tog"),
    "tables-without-k": (
        {"k": None, "v": None, "rotary_cos": torch.ones(12, 4), "rotary_sin": torch.ones(12, 4)},
        "k and v must be given",
    ),
    "index-and-pages": (
        {"cache_batch_idx": torch.zeros(3).int(), "block_table": torch.zeros(3, 1).int()},
        "cache_batch_idx must be None with a block_table",
    ),
    "start-and-pages": (
        {"cache_leftpad": torch.zeros(3).int(), "block_table": torch.zeros(3, 1).int()},
        "cache_leftpad must be None with a block_table",
    ),
    "two-names": (
        {"page_table": torch.zeros(3, 1).int(), "block_table": torch.zeros(3, 1).int()},
        "two names of one argument",
    ),
    "no-row-for-length": (
        {"cache_seqlens": torch.zeros(2).int()},
        r"cache_seqlens must have shape",
    ),
    "floats": ({"cache_leftpad": torch.zeros(3)}, "cache_leftpad must be an int32 or int64"),
    "flat-table": ({"block_table": torch.zeros(3).int()}, "block_table must have shape"),
    "rows": ({"cache_batch_idx": torch.zeros(1, 3).int()}, "cache_batch_idx must have shape"),
    "table-of-no-dim": ({"block_table": torch.tensor(0).int()}, "block_table must have shape"),
    "keys-of-three-dims": ({"k": torch.zeros(3, 1, D)}, "k must have 4 dimensions"),
    "list": ({"v": [0.0]}, r"v must be a torch\.Tensor, got list"),
    "keys-of-another-dtype": (
        {"k": torch.zeros(3, 1, 2, D).half()},
        r"k must have the cache's dtype torch\.float32, got torch\.float16",
    ),
    "values-of-other-heads": ({"v": torch.zeros(3, 1, 3, D)}, r"v must have shape \[3, 2, T, "),
    "new-rows": ({"k": torch.zeros(2, 1, 2, D)}, r"k must have shape \[3, 2, T, "),
    "fewer-values": ({"k": torch.zeros(3, 2, 2, D)}, "must hold the same number of tokens"),
    "no-tables": (
        {"rotary_cos": [1.0], "rotary_sin": [0.0]},
        r"rotary_cos must be a torch\.Tensor, got list",
    ),
    "too-long": ({"cache_seqlens": 12}, "12 and 1 new tokens exceed 12 places"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_runtime_errors(name, draw):
    changed, message = CONTRADICTIONS[name]
    cache, new = torch.zeros(3, S, 2, D), torch.zeros(3, 1, 2, D)
    given = {"k": new, "v": new, "cache_seqlens": 3, **changed}
    with pytest.raises(RuntimeError, match=message):
        flash_attn.flash_attn_with_kvcache(torch.zeros(3, 1, 4, D), cache, cache, **given)
