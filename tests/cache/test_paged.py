"""PagedKVCache against a list of tokens a row: contents, page counts, what failures leave."""

import copy
import random

import pytest
import torch

from fastattn import OutOfPages, PagedKVCache
from fastattn.cache.append import append
from fastattn.cache.page_allocator import OutOfRows
from fastattn.quantization import dequantize_rows, quantize_rows

H, D, D_V = 2, 3, 2
PAGES, MAX_ROWS = 14, 5


def make_cache(page_size: int = 3, **options) -> PagedKVCache:
    return PagedKVCache(
        PAGES, page_size, H, D, value_dim=D_V, max_rows=MAX_ROWS, max_pages_per_row=9, **options
    )


def contents(ids: torch.Tensor, width: int) -> torch.Tensor:
    """[B, H, T, width] of token numbers [B, T]: no two tokens, heads or channels are alike."""
    channel = torch.arange(H * width, dtype=torch.float32).view(1, H, 1, width)
    return ids[:, None, :, None].float() + channel / 16


def snapshot(cache: PagedKVCache) -> tuple:
    tensors = [cache.k, cache.v, cache.block_table, cache.lengths, cache.k_scale, cache.v_scale]
    # As bytes, so that NaN in unused slots equals itself.
    raw = [x.contiguous().view(torch.uint8).clone() for x in tensors if x is not None]
    return copy.deepcopy(vars(cache._allocator)), raw


def assert_unchanged(cache: PagedKVCache, before: tuple) -> None:
    allocator, tensors = snapshot(cache)
    assert allocator == before[0]
    for now, then in zip(tensors, before[1], strict=True):
        assert torch.equal(now, then)


class ListModel:
    """A list of token numbers a row."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.issued = 0

    def new_ids(self, B: int, T: int) -> torch.Tensor:
        self.issued += B * T
        return torch.arange(self.issued - B * T, self.issued).view(B, T)

    def assert_equals(self, cache: PagedKVCache) -> None:
        """Contents of every row, and that the host and the tensors agree."""
        assert cache.rows == list(self.rows)
        held: dict[int, int] = {}
        for row, ids in self.rows.items():
            pages = cache.pages(row)
            assert cache.length(row) == len(ids)
            assert len(pages) >= -(-len(ids) // cache.page_size)
            assert cache.block_table[row, : len(pages)].tolist() == pages
            for page in pages:
                held[page] = held.get(page, 0) + 1
        assert held == {p: n for p in range(PAGES) if (n := cache._allocator.holders(p))}
        assert sorted(cache._allocator._free_pages) == [p for p in range(PAGES) if p not in held]
        expected = [len(self.rows.get(row, [])) for row in range(MAX_ROWS)]
        assert cache.lengths.tolist() == expected
        if self.rows:
            self.assert_same_contents(cache)

    def assert_same_contents(self, cache: PagedKVCache) -> None:
        rows = list(self.rows)
        longest = max(map(len, self.rows.values()))
        ids = torch.tensor([r + [-1] * (longest - len(r)) for r in self.rows.values()]).long()
        for layer in range(cache.num_layers):
            k, v, positions = (
                x[..., :longest, :] if x.dim() == 4 else x[:, :longest]
                for x in cache.view(rows, layer).gather()
            )
            token = ids >= 0
            assert torch.equal(positions, torch.where(token, torch.arange(longest), -1).int())
            for got, width in ((k, D), (v, D_V)):
                wanted = contents(ids + 1000 * layer, width)
                if cache.quantize is not None:
                    wanted = dequantize_rows(*quantize_rows(wanted, cache.quantize), cache.dtype)
                assert torch.equal(got, wanted.masked_fill(~token[:, None, :, None], 0))


class Driver:
    """Random steps on a cache and on the model, every failure checked to change nothing."""

    def __init__(self, cache: PagedKVCache, seed: int, backend: str) -> None:
        self.cache = cache
        self.model = ListModel()
        self.random = random.Random(seed)
        self.backend = backend
        self.done: dict[str, int] = {}

    def run(self, steps: int) -> None:
        names = [
            "allocate", "free", "fork", "append", "append", "append", "append", "reserve",
            "truncate", "reorder", "compact",
        ]  # fmt: skip
        for _ in range(steps):
            name = self.random.choice(names)
            if name != "allocate" and not self.model.rows:
                continue
            outcome = getattr(self, name)() or name
            self.done[outcome] = self.done.get(outcome, 0) + 1
            self.model.assert_equals(self.cache)

    def row(self) -> int:
        return self.random.choice(list(self.model.rows))

    def some_rows(self) -> list[int]:
        rows = list(self.model.rows)
        return self.random.sample(rows, self.random.randint(1, len(rows)))

    def new_row(self, make, ids: list[int]) -> str | None:
        if len(self.model.rows) < MAX_ROWS:
            self.model.rows[make()] = ids
            return None
        before = snapshot(self.cache)
        with pytest.raises(OutOfRows, match=r"all 5 rows of the cache are in use"):
            make()
        assert_unchanged(self.cache, before)
        return "out of rows"

    def allocate(self) -> str | None:
        return self.new_row(self.cache.allocate, [])

    def fork(self) -> str | None:
        row = self.row()
        return self.new_row(lambda: self.cache.fork(row), list(self.model.rows[row]))

    def free(self) -> None:
        row = self.row()
        self.cache.free(row)
        del self.model.rows[row]

    def truncate(self) -> None:
        row, length = self.row(), self.random.randint(0, 12)
        self.cache.truncate(row, length)
        self.model.rows[row] = self.model.rows[row][:length]

    def compact(self) -> str | None:
        row = self.row()
        ids = self.model.rows[row]
        first = self.random.randint(0, len(ids))
        behind = range(first, len(ids))
        kept = self.random.sample(behind, self.random.randint(0, len(behind)))
        before = snapshot(self.cache)
        try:
            self.cache.compact(row, first, kept)
        except ValueError as error:
            assert "must share no token" in str(error)
            assert_unchanged(self.cache, before)
            return "shared"
        self.model.rows[row] = ids[:first] + [ids[t] for t in kept]
        return None

    def reorder(self) -> None:
        rows = self.some_rows()
        index = [self.random.randrange(len(rows)) for _ in rows]
        self.cache.reorder(rows, index)
        moved = [list(self.model.rows[rows[i]]) for i in index]
        self.model.rows.update(zip(rows, moved, strict=True))

    def reserve(self) -> str | None:
        rows = self.some_rows()
        return self.make_room(rows, lambda: self.cache.reserve(rows, self.random.randint(0, 4)))

    def append(self) -> str | None:
        rows = self.some_rows()
        T = self.random.randint(0, 5)
        ragged = self.random.random() < 0.5
        counts = [self.random.randint(-1, T + 1) if ragged else T for _ in rows]
        ids = self.model.new_ids(len(rows), T)

        def append(layer: int) -> None:
            k, v = contents(ids + 1000 * layer, D), contents(ids + 1000 * layer, D_V)
            new = counts if ragged else None
            self.cache.append(rows, k, v, new, layer=layer, backend=self.backend)

        outcome = self.make_room(rows, lambda: append(0))
        if outcome is None:
            for layer in range(1, self.cache.num_layers):
                append(layer)
            for row, count, new in zip(rows, counts, ids.tolist(), strict=True):
                self.model.rows[row] = self.model.rows[row] + new[: max(count, 0)]
        return outcome

    def make_room(self, rows: list[int], call) -> str | None:
        before = snapshot(self.cache)
        try:
            call()
        except OutOfPages as error:
            assert error.needed > error.free == self.cache.free_pages
        except ValueError as error:
            assert "a row has room for max_pages_per_row * page_size" in str(error)
        else:
            return None
        assert_unchanged(self.cache, before)
        return "no room"


OUTCOMES = {
    "allocate", "free", "fork", "append", "reserve", "truncate", "reorder", "compact", "shared",
    "out of rows", "no room",
}  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "steps", "options"),
    [(3, 1500, {}), (1, 700, {"quantize": "int8"}), (4, 700, {"num_layers": 2, "quantize": "fp8"})],
)
def test_thousands_of_random_steps_equal_the_list_model(page_size, steps, options, one_thread):
    driver = Driver(make_cache(page_size, **options), seed=0, backend="torch")
    driver.run(steps)
    assert set(driver.done) == OUTCOMES, "a kind of step was never tried"
    for row in list(driver.model.rows):
        driver.cache.free(row)
    assert driver.cache.free_pages == PAGES


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "quantize": "int8"}], ids=str)
def test_random_steps_by_the_kernel(options, one_thread):
    if torch.cuda.is_available():
        pytest.skip("the model's tensors are on the CPU, where no compiled kernel runs")
    Driver(make_cache(**options), seed=1, backend="triton").run(60)


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
