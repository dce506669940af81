"""Where the kernels say that a token is kept, against slots that are filled one token at a time."""

import pytest
import torch
import triton
import triton.language as tl

from fastattn import KVCache, PagedKVCache
from fastattn.kernels.launch.interpreter import mend
from fastattn.kernels.rules.pages import CacheTensors, lasting, locate, pages_of, slot_rows

POSITIONS = 64


@triton.jit
def place_kernel(row, end, pages, page_ptr, slot_ptr, kept_ptr, row_ptr, N: tl.constexpr):
    """Page, slot, whether kept, and number of the slot's row in head 1, of positions 0..N-1."""
    positions = tl.arange(0, N)
    keep = positions < end
    page, slot = locate(row, positions, keep, pages)
    tl.store(page_ptr + positions, page, mask=keep)
    tl.store(slot_ptr + positions, slot)
    tl.store(kept_ptr + positions, lasting(positions, end, pages).to(tl.int32))
    tl.store(row_ptr + positions, slot_rows(page, 1, slot, pages), mask=keep)


def places(cache: KVCache | PagedKVCache, row: int, end: int) -> list[torch.Tensor]:
    """Places that the kernel computes for `end` tokens of a row."""
    mend()
    view = cache.view([row]) if isinstance(cache, PagedKVCache) else cache.view()
    of_rows = (view.block_table, view.lengths, view.counters)
    tensors = CacheTensors(view.k, view.v, None, None, *of_rows, None, view.keep_first)
    out = [torch.full((POSITIONS,), -1, dtype=torch.int64, device=view.k.device) for _ in range(4)]
    place_kernel[(1,)](row, end, pages_of(tensors), *out, N=POSITIONS)
    return [x[:end].cpu() for x in out]


@pytest.mark.parametrize(("slots", "first"), [(7, 2), (6, 0), (5, 4), (9, 8)])
@pytest.mark.parametrize("end", [1, 5, 9, 40])
def test_ring(slots, first, end, device):
    cache = KVCache(2, 2, slots, 4, window=slots - first, keep_first=first, device=device)
    page, slot, kept, _ = places(cache, 1, end)
    assert page.tolist() == [1] * end
    holds: dict[int, int] = {}
    free = iter(range(slots))
    for position in range(end):
        # The oldest token past the first ones makes room.
        oldest = [s for s, p in holds.items() if p == position - (slots - first)]
        holds[oldest[0] if position >= slots else next(free)] = position
    assert {int(slot[p]): p for p in range(end) if kept[p]} == holds


def test_pages(device):
    cache = PagedKVCache(12, 3, 2, 4, max_rows=4, device=device)
    rows = [cache.allocate(), cache.allocate()]
    for row in (*rows, *rows[::-1]):
        cache.reserve([row], cache.length(row) + 4)
        cache.advance([row], 4)
    page, slot, kept, flat = places(cache, rows[1], 8)
    assert page.tolist() == [cache.pages(rows[1])[p // 3] for p in range(8)]
    assert slot.tolist() == [p % 3 for p in range(8)]
    assert kept.tolist() == [1] * 8
    numbers = torch.arange(12 * 2 * 3).view(12, 2, 3)
    assert torch.equal(flat, numbers[page, 1, slot])


def test_contiguous(device):
    page, slot, kept, flat = places(KVCache(3, 2, 10, 4, device=device), 2, 10)
    assert (page.tolist(), slot.tolist()) == ([2] * 10, list(range(10)))
    assert kept.all()
    assert flat.tolist() == [(2 * 2 + 1) * 10 + s for s in range(10)]
