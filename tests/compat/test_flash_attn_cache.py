"""flash-attn's caches, written and read in place, against the naive reference."""

import numpy as np
import pytest
import torch
from calls_of_flash_attn import CASES, case, check, offsets

from fastattn.compat import flash_attn

pytestmark = pytest.mark.usefixtures("models_on_torch")


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


def test_lengths_as_a_number_and_by_default(caches, draw):
    q, (k_cache, v_cache) = draw(3, 1, 4, D), caches
    check(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache), q, k_cache, v_cache)
    numbers = {
        "cache_seqlens": np.int64(6),
        "softmax_scale": np.float32(0.3),
        "causal": np.bool_(True),
        "window_size": torch.tensor([3, -1]),
        "num_splits": np.int32(0),
    }
    found = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **numbers)
    check(found, q, k_cache[:, :6], v_cache[:, :6], scale=0.3, window=(3, None))


@pytest.fixture
def paged(draw, device):
    """Pages [P, 4, 2, D], a table of shuffled pages, and the same rows in order."""
    k_pages, v_pages = draw(10, 4, 2, D), draw(10, 4, 2, D)
    table = torch.tensor([[7, 1, 4], [0, 9, 2]], dtype=torch.int32, device=device)
    return k_pages, v_pages, table


def in_order(pages, table):
    return pages[table.long()].flatten(1, 2)


def test_varlen_over_pages(paged, draw, device):
    k_pages, v_pages, table = paged
    q = draw(5, 4, D)
    cu_q, cu_k = offsets((4, 1), device), offsets((6, 11), device)
    given = {"causal": True, "block_table": table, "return_attn_probs": True}
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 4, 11, **given)
    keys, values = in_order(k_pages, table), in_order(v_pages, table)
    for n, (rows, length) in enumerate([(slice(0, 4), 6), (slice(4, 5), 11)]):
        part = (o[None, rows].contiguous(), lse[None, :, rows])
        seen = (x[n : n + 1, :length] for x in (keys, values))
        check(part, q[None, rows], *seen, causal=True)
    used = cu_k.diff()
    given = {"seqused_k": used, "max_seqlen_q": 4, "causal": True, "page_table": table}
    again = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, return_lse=True, **given)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)
