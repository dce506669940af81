"""No store of an append leaves its row, whatever the lengths, the table and the index say."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastattn import decode_attention
from fastattn.cache.append import append
from fastattn.cache.views import view_of_tensors
from fastattn.cache_view import CacheView
from fastattn.compat.flash_attn import flash_attn_with_kvcache
from fastattn.quantization import codes_within, quantize_rows
from fastattn.testing.budget import assert_within_budget

H, S, D, T = 2, 4, 16, 3
FAR = 2**33


class Case(NamedTuple):
    """Lengths of rows before T tokens are appended, and where the rows are kept."""

    lengths: list[int]
    table: list[list[int]] | None = None
    keep_first: int | None = None
    batch_index: list[int] | None = None
    starts: list[int] | None = None


CASES = {
    "dense": Case([0, 2, 3, 4, 5, FAR, -1, -2, -FAR, 2**31 - 1]),
    "left padded": Case([2, 3, -1, FAR], starts=[0, 2, 1, 0]),
    "some rows": Case([2, 3, -1, 9], batch_index=[3, 1, 2]),
    "ring": Case([0, 3, 9, -1, -FAR, FAR], keep_first=1),
    "paged": Case([1, 7, 8, 2, -2, FAR, -FAR], [[6, 2], [1, 3], [0, 4], [5, 7]] + 3 * [[8, 9]]),
    "pages out of the pool": Case(
        [3, 3, 3, 0, 3], [[0, -1], [1, 5], [2, 2**31 - 1], [-(2**31), 3], [-FAR, FAR + 4]]
    ),
}


class Pool(NamedTuple):
    """A view, and the memory that its buffers are the middle of: a page more on either side."""

    view: CacheView
    memory: list[Tensor]


def codes_and_scale(quantize: str | None) -> tuple[str | None, Tensor | None]:
    """Kind of codes, and the scale that is given: numbers too large for it become the largest."""
    codes, _, per = (quantize or "").partition(" a ")
    least = 1 / (60 if codes == "int8" else 400)
    scales = {"head": torch.tensor([least, least / 2]), "tensor": torch.tensor([least / 2])}
    return codes or None, scales.get(per)


def make_pool(case: Case, quantize: str | None, device: str) -> Pool:
    P = len(case.lengths) if case.table is None else 10 if len(case.table) > 5 else 5
    codes, given = codes_and_scale(quantize)
    dtype = {None: torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[codes]
    if given is None:
        buffers = [torch.full((P + 2, H, S, D), 7.0, device=device).to(dtype) for _ in "kv"]
        scales = [torch.full((P + 2, H, S), 7.0, device=device) for _ in "kv" if quantize]
    else:  # as a server has them: K and V side by side, tokens before heads
        both = torch.full((P + 2, S, H, 2 * D), 7.0, device=device).to(dtype).transpose(1, 2)
        buffers, scales = [both[..., :D], both[..., D:]], [given.to(device) for _ in "kv"]

    def rows(x: list | None) -> Tensor | None:
        return None if x is None else torch.tensor(x, device=device)

    view = view_of_tensors(
        *(x[1:-1] for x in buffers),
        rows(case.lengths),
        **{
            f"{name}_scale": x[1:-1] if given is None else x
            for name, x in zip("kv", scales, strict=False)
        },
        block_table=rows(case.table),
        batch_index=rows(case.batch_index),
        starts=rows(case.starts),
        window=None if case.keep_first is None else 2,
        keep_first=case.keep_first or 0,
        dtype=torch.float32,
    )
    return Pool(view, [*buffers, *scales])


def place_of(case: Case, pages: int, row: int, position: int, end: int) -> tuple[int, int] | None:
    """Page and slot of a token, None where it has none; `end` tokens are in the row after it."""
    if position < 0:
        return None
    if case.keep_first is not None:
        rest = S - case.keep_first
        if position < case.keep_first:
            return row, position
        lasts = position >= end - rest
        return (row, case.keep_first + (position - case.keep_first) % rest) if lasts else None
    if case.table is None:
        return (row, position) if position < S else None
    if position // S >= len(case.table[row]):
        return None
    page = case.table[row][position // S]
    return (page, position % S) if 0 <= page < pages else None


def expected_memory(case: Case, pool: Pool, k: Tensor, v: Tensor, quantize: str | None):
    memory = [x.clone() for x in pool.memory]
    codes_of, given = codes_and_scale(quantize)
    inner = [x[1:-1] for x in memory]
    for b, row in enumerate(case.batch_index or range(len(case.lengths))):
        first = case.lengths[row]
        for i in range(T):
            place = place_of(case, len(inner[0]), row, first + i, first + T)
            if place is None:
                continue
            page, slot = place
            for n, x in enumerate((k[b, :, i], v[b, :, i])):
                if given is not None:
                    codes = codes_within(x, given.to(x.device)[:, None], codes_of)
                elif quantize:
                    codes, scale = quantize_rows(x, quantize)
                    inner[2 + n][page, :, slot] = scale
                inner[n].view(torch.uint8)[page, :, slot] = (codes if quantize else x).view(
                    torch.uint8
                )
    return memory


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    ("name", "quantize"),
    [(name, quantize) for name in CASES for quantize in (None, "int8", "fp8")]
    + [("paged", f"{codes} a {per}") for codes in ("int8", "fp8") for per in ("head", "tensor")],
)
def test_nothing_but_the_places_of_its_tokens_is_written(name, quantize, backend, device):
    case = CASES[name]
    pool = make_pool(case, quantize, device)
    B = pool.view.batch_size
    k, v = torch.randn(2, B, H, T, D, device=device)
    expected = expected_memory(case, pool, k, v, quantize)
    append(pool.view, k, v, backend=backend)
    for got, wanted in zip(pool.memory, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    counted = list(case.lengths)
    for row in case.batch_index or range(B):
        counted[row] += T
    assert pool.view.lengths.tolist() == counted


@pytest.mark.parametrize("name", ["dense", "left padded", "paged", "pages out of the pool"])
def test_what_is_read_then_is_the_same_by_both_backends(name, device, unread):
    """Finite, too: nothing beside the pool is read, where there is NaN."""
    case = CASES[name]
    pool = make_pool(case, None, device)
    k, v, q = torch.randn(3, len(case.lengths), H, T, D, device=device)
    append(pool.view, k, v, backend="triton")
    for x in pool.memory:
        x[0] = x[-1] = torch.nan
    kernel, naive = (
        decode_attention(q, pool.view, backend=backend) for backend in ("triton", "torch")
    )
    view = pool.view._replace(k=pool.view.k.double(), v=pool.view.v.double(), dtype=torch.float64)
    exact = decode_attention(q.double(), view)
    assert_within_budget("o", kernel, exact, naive)


def test_queries_and_keys_are_not_rotated_where_the_tables_do_not_reach(device):
    angle = torch.arange(6.0, device=device)[:, None].expand(6, D // 2)
    tables = (angle.cos().contiguous(), angle.sin().contiguous())
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        pool = make_pool(CASES["dense"], None, device)
        k, v, q = torch.randn(3, pool.view.batch_size, H, T, D, device=device)
        turned = append(pool.view, k, v, q=q, rotary=tables, backend=backend)
        results.append((turned, *pool.memory))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    for b, length in enumerate(CASES["dense"].lengths):
        for i in range(T):
            turned = results[0][0][b, :, i]
            assert torch.equal(turned, q[b, :, i]) == (not 0 < length + i < 6), (length, i)


def test_an_index_of_no_row_is_passed_over_by_the_kernel(device):
    case = Case([1, 1, 1])
    pool = make_pool(case, None, device)
    index = torch.tensor([1, 3, -1, FAR], device=device)  # a view of tensors on a CPU refuses it
    k, v = torch.randn(2, 4, H, T, D, device=device)
    wanted = expected_memory(case._replace(batch_index=[1]), pool, k, v, None)
    append(pool.view._replace(batch_index=index), k, v, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(pool.memory, wanted, strict=True))
    assert pool.view.lengths.tolist() == [1, 1 + T, 1]
    assert pool.view.counters.tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("kind", ["dense", "left padded", "index", "paged"])
def test_caches_of_flash_attn(kind, backend, device, unread, monkeypatch):
    """Three tokens for rows with room for 3, 1 and 0, and for one of negative length."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend)
    memory = torch.full((2, 8, S, H, D), 7.0, device=device)
    before = memory.clone()
    lengths = torch.tensor([1, 3, FAR, -1], device=device)
    where: dict[str, Tensor] = {}
    places = {0: [(1, 1), (1, 2), (1, 3)], 1: [(2, 3), None, None], 3: [None, (4, 0), (4, 1)]}
    if kind == "left padded":
        pads = torch.tensor([1, 2, 0, 5], dtype=torch.int32, device=device)
        where = {"cache_leftpad": pads}
    elif kind == "index":
        where = {"cache_batch_idx": torch.tensor([0, 1, 2, 6], device=device, dtype=torch.int32)}
        places[3] = []
    elif kind == "paged":
        table = torch.tensor([[0], [1], [2], [2**31 - 1]], device=device, dtype=torch.int32)
        where, places[3] = {"block_table": table}, []
    q, k, v = torch.randn(3, 4, T, H, D, device=device)
    inner = memory[:, 1:-1]
    o = flash_attn_with_kvcache(
        q, inner[0], inner[1], k, v, cache_seqlens=lengths, causal=True, **where
    )
    for b, of_row in places.items():
        for i, place in enumerate(of_row):
            if place is not None:
                before[0][place], before[1][place] = k[b, i], v[b, i]
    assert torch.equal(memory, before)
    assert o.isfinite().all()


@pytest.mark.parametrize("length", [S, FAR])
def test_a_length_that_is_a_number_leaves_room_on_every_device(length, device, unread):
    q, k, v = torch.randn(3, 2, 1, H, D, device=device)
    k_cache, v_cache = torch.randn(2, 2, S, H, D, device=device)
    with pytest.raises(
        RuntimeError, match=f"cache_seqlens={length} and 1 new tokens exceed {S} pl"
    ):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=length)
