"""PagedKVCache: generated histories, shared pages, sizes, and what there is no room for."""

from dataclasses import replace

import pytest
import torch
from fuzz.cases import drawn, legal
from fuzz.judges import check
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import OutOfPages, PagedKVCache, view_of_tensors
from fastattn.cache.append import append
from fastattn.cache.page_allocator import OutOfRows

H, D, D_V = 2, 3, 2
PAGES, MAX_ROWS = 14, 5


def make_cache(page_size: int = 3, **options) -> PagedKVCache:
    return PagedKVCache(
        PAGES, page_size, H, D, value_dim=D_V, max_rows=MAX_ROWS, max_pages_per_row=9, **options
    )


@pytest.mark.parametrize("start", range(0, 160, 40))
def test_generated_histories(start: int, one_thread: None) -> None:
    """Rows that fork, grow, move, are cut off, compacted and freed; rings and whole caches too."""
    for seed in range(start, start + 40):
        case = drawn(seed, "torch")
        check(legal(replace(case, call="append", B=max(1, case.B))))


def test_pages_are_shared_until_a_row_writes():
    cache = make_cache(page_size=4)
    row = cache.allocate()
    x = torch.arange(6.0).view(1, 1, 6, 1)
    cache.append([row], x.expand(1, H, 6, D), x.expand(1, H, 6, D_V))
    twin, third = cache.fork(row), cache.fork(row)
    assert cache.pages(row) == cache.pages(twin) == cache.pages(third)
    assert cache.free_pages == PAGES - 2
    new = torch.full((2, H, 1, D), 9.0), torch.full((2, H, 1, D_V), 9.0)
    cache.append([row, twin], *new)
    first, own = zip(*(cache.pages(r) for r in (row, twin, third)), strict=True)
    assert len(set(first)) == 1
    assert len(set(own)) == 3
    cache.append([third], new[0][:1], new[1][:1])
    assert cache.pages(third)[1] == own[2], "the last holder writes in place"
    assert cache.free_pages == PAGES - 4


def test_of_the_rows_that_write_into_a_shared_page_one_keeps_it():
    """So two forks of a row need one page, not two."""
    cache = make_cache(page_size=4)
    row = cache.allocate()
    cache.append([row], torch.ones(1, H, 2, D), torch.ones(1, H, 2, D_V))
    twin, big = cache.fork(row), cache.allocate()
    cache.reserve([big], 4 * 9)
    full = cache.allocate()
    cache.reserve([full], 4 * (cache.free_pages - 1))
    assert cache.free_pages == 1
    cache.append([row, twin], torch.ones(2, H, 1, D), torch.ones(2, H, 1, D_V))
    assert cache.free_pages == 0
    assert cache.pages(row) != cache.pages(twin)


def test_reserve_and_advance_count_as_an_append_that_others_make():
    cache = make_cache()
    row = cache.allocate()
    cache.reserve([row], 4)
    x = torch.ones(1, H, 4, D)
    k, v, view = x, x[..., :D_V], cache.view([row])
    append(view, k, v)
    cache.advance([row], 4)
    assert cache.length(row) == int(cache.lengths[row]) == 4
    assert torch.equal(cache.view([row]).gather()[0][:, :, :4], x)


@pytest.mark.parametrize("layout", ["heads, tokens", "tokens, heads", "keys beside values"])
def test_pages_of_any_layout_are_gathered_whole(layout: str) -> None:
    """Tokens one by one take longer on a CPU."""
    pages = torch.randn(7, 5, H, 2 * D) if layout != "heads, tokens" else torch.randn(7, H, 5, D)
    stored = {"heads, tokens": pages, "tokens, heads": pages[..., :D].contiguous().transpose(1, 2)}
    k = stored.get(layout, pages[..., :D].transpose(1, 2))
    table = torch.tensor([[6, 0], [3, 3]], dtype=torch.int32)
    view = view_of_tensors(k, k, torch.tensor([10, 7]), block_table=table)
    with Whole():
        gathered, _ = view.gather_slots()
    assert torch.equal(gathered, k[table.long()].transpose(1, 2).flatten(2, 3))


class Whole(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.index.Tensor or args[0].dim() < 4
        return function(*args, **(kwargs or {}))


def test_no_value_is_read_back():
    """Meta tensors have no values: any read of one raises."""
    cache = make_cache(device="meta")
    k, v = torch.empty(1, H, 4, D, device="meta"), torch.empty(1, H, 4, D_V, device="meta")
    row = cache.allocate()
    cache.append([row], k, v)
    twin = cache.fork(row)
    cache.append([twin], k, v)
    cache.reorder([row, twin], [1, 1])
    cache.truncate(row, 2)
    cache.free(twin)
    assert cache.view([row]).batch_index.device.type == "meta"


def test_sizes_bytes_and_view():
    cache = PagedKVCache(4, 16, 2, 8, dtype=torch.bfloat16, max_rows=3)
    assert cache.k.shape == cache.v.shape == (1, 4, 2, 16, 8)
    assert cache.block_table.shape == (3, 4)
    assert cache.nbytes == 2 * 4 * 2 * 16 * 8 * 2 + 3 * 4 * 4 + 3 * 4
    row = cache.allocate()
    view = cache.view([row])
    assert view.k.shape == (4, 2, 16, 8)
    assert view.k.data_ptr() == cache.k.data_ptr()
    assert (view.page_size, view.length_bound, view.batch_index.tolist()) == (16, 0, [row])
    assert cache.view([row]).batch_index is view.batch_index


@pytest.mark.parametrize("width", [3, 8, 20])
def test_rows_start_at_whole_16_bytes(width):
    for quantize, size in ((None, 4), ("int8", 1)):
        k = PagedKVCache(4, 5, 2, width, quantize=quantize).view([]).k
        assert k.stride(2) * size % 16 == 0
        assert k.stride() == (10 * k.stride(2), 5 * k.stride(2), k.stride(2), 1)


def test_out_of_pages_says_what_is_missing():
    cache = make_cache()
    rows = [cache.allocate(), cache.allocate()]
    message = r"the cache needs 18 more pages, but 14 of its 14 are free: free or truncate rows"
    with pytest.raises(OutOfPages, match=message) as caught:
        cache.reserve(rows, 27)
    assert (caught.value.needed, caught.value.free) == (18, 14)
    assert [cache.allocate() for _ in range(3)] == [2, 3, 4]
    with pytest.raises(OutOfRows, match=r"all 5 rows of the cache are in use"):
        cache.fork(0)
