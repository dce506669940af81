"""Judges of what caches hold after tokens came, were cut off, moved, forked and freed."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.cache_view import CacheView
from fastattn.rotary import rotary_tables
from fastattn.testing.calls import Draw

from .cases import Case

_SLOTS = 24
_ROWS = 4  # of a paged cache
Token = tuple[Tensor, Tensor]


class _Dense:
    """A contiguous cache or a ring, whose rows are there from the start."""

    def __init__(self, draw: Draw, B: int, sizes: tuple[int, int], kind: dict[str, Any]) -> None:
        ring = draw.choice({}, {}, {"window": 5, "keep_first": draw.choice(0, 2)})
        self.slots = 9 if ring else _SLOTS
        self.unbounded = bool(ring)
        self.make = lambda B: fastattn.KVCache(B, sizes[0], self.slots, sizes[1], **kind, **ring)
        self.cache = self.make(B)
        self.rows = list(range(B))

    def fits(self, held: dict[int, list[Token]], rows: list[int], T: int) -> bool:
        return self.unbounded or max(len(held[row]) + T for row in rows) <= self.slots

    def append(
        self, rows: list[int], k: Tensor, v: Tensor, counts: Tensor | None, **how: Any
    ) -> Any:
        index = None if rows == self.rows else torch.tensor(rows)
        return self.cache.append(k, v, counts, batch_index=index, **how)

    def change(self, draw: Draw, held: dict[int, list[Token]], turned: bool) -> None:
        if draw.chance(0.5):
            index = draw.integers(0, len(self.rows) - 1, len(self.rows))
            self.cache.reorder(index)
            held |= dict(enumerate([list(held[i]) for i in index.tolist()]))
        elif not self.unbounded:
            lengths = draw.integers(-1, _SLOTS, len(self.rows))
            lengths = draw.choice(lengths, max(0, int(lengths[0])))
            self.cache.truncate(lengths)
            for row in self.rows:
                keep = lengths if isinstance(lengths, int) else max(0, int(lengths[row]))
                del held[row][keep:]

    def view(self, row: int) -> CacheView:
        return self.cache.view(torch.tensor([row]))

    def check(self, held: dict[int, list[Token]]) -> None:
        lengths = [len(held[row]) for row in self.rows]
        assert self.cache.lengths.tolist() == lengths, "lengths"
        uniform = self.cache.uniform_length
        assert uniform is None or lengths == [uniform] * len(lengths), "uniform_length"


class _Paged:
    """Pages of a pool, with rows that come and go; what a second layer holds is the negative."""

    def __init__(self, draw: Draw, B: int, sizes: tuple[int, int], kind: dict[str, Any]) -> None:
        self.page, self.layers = draw.choice(1, 3, 16), draw.choice(1, 1, 2)
        self.make = lambda B: fastattn.KVCache(B, sizes[0], _SLOTS, sizes[1], **kind)
        pages = _ROWS * -(-_SLOTS // self.page)
        self.cache = fastattn.PagedKVCache(
            pages, self.page, *sizes, max_rows=_ROWS, num_layers=self.layers, **kind
        )
        self.all = self.cache.free_pages
        self.rows = [self.cache.allocate() for _ in range(min(B, _ROWS))]

    def fits(self, held: dict[int, list[Token]], rows: list[int], T: int) -> bool:
        return max(len(held[row]) + T for row in rows) <= _SLOTS

    def append(
        self, rows: list[int], k: Tensor, v: Tensor, counts: Tensor | None, **how: Any
    ) -> Any:
        new = None if counts is None else counts.tolist()
        turned = self.cache.append(rows, k, v, new, **how)
        if self.layers == 2:
            self.cache.append(rows, -k, -v, new, layer=1, **how)
        return turned

    def change(self, draw: Draw, held: dict[int, list[Token]], turned: bool) -> None:
        row = draw.choice(*self.rows)
        what = draw.choice("fork", "truncate", "reorder", "free", "allocate", "reserve", "compact")
        if what == "fork" and len(self.rows) < _ROWS:
            twin = self.cache.fork(row)
            self.rows.append(twin)
            held[twin] = list(held[row])
            assert len(self.cache.pages(twin)) == -(-len(held[twin]) // self.page), "pages"
        elif what == "truncate":
            keep = draw.integer(0, _SLOTS)
            self.cache.truncate(row, keep)
            del held[row][keep:]
            assert len(self.cache.pages(row)) == -(-len(held[row]) // self.page), "pages"
        elif what == "reorder":
            index = draw.integers(0, len(self.rows) - 1, len(self.rows)).tolist()
            self.cache.reorder(self.rows, index)
            moved = [list(held[self.rows[i]]) for i in index]
            held |= dict(zip(self.rows, moved, strict=True))
        elif what == "free" and len(self.rows) > 1:
            self.cache.free(row)
            self.rows.remove(row)
            del held[row]
        elif what == "allocate" and len(self.rows) < _ROWS:
            self.rows.append(self.cache.allocate())
            held[self.rows[-1]] = []
        elif what == "reserve":
            self.cache.reserve([row], min(draw.integer(0, 9), _SLOTS - len(held[row])))
        elif what == "compact" and not turned:  # which tokens are to where they stand
            self._compact(draw, row, held)

    def _compact(self, draw: Draw, row: int, held: dict[int, list[Token]]) -> None:
        first = draw.integer(0, len(held[row]))
        kept = draw.some(list(range(first, len(held[row]))), draw.integer(0, 5))
        pages = self.cache.pages(row)[first // self.page :]
        others = {page for other in self.rows if other != row for page in self.cache.pages(other)}
        if first < len(held[row]) and others.intersection(pages):
            with pytest.raises(ValueError, match="must share no token"):
                self.cache.compact(row, first, kept)
        else:
            self.cache.compact(row, first, kept)
            held[row][first:] = [held[row][t] for t in kept]

    def view(self, row: int, layer: int = 0) -> CacheView:
        return self.cache.view([row], layer)

    def check(self, held: dict[int, list[Token]]) -> None:
        cache, lengths = self.cache, {row: len(x) for row, x in held.items()}
        assert {row: cache.length(row) for row in cache.rows} == lengths, "lengths"
        assert cache.lengths.tolist() == [lengths.get(row, 0) for row in range(_ROWS)], "lengths"
        pages = {row: cache.pages(row) for row in self.rows}
        for row, own in pages.items():
            assert cache.block_table[row, : len(own)].tolist() == own, "block table"
            assert len(own) >= -(-lengths[row] // self.page), "pages"
        owners = Counter(page for own in pages.values() for page in own)
        assert cache.free_pages == self.all - len(owners), "free pages"
        assert all(cache._allocator.holders(page) == n for page, n in owners.items()), "holders"


def judge(case: Case) -> None:
    """Each row holds what a new cache of that row alone holds, of the tokens that are left."""
    draw = case.random("append")
    dtype = torch.float32 if case.dtype is torch.float64 else case.dtype
    kind = {"value_dim": case.D_v, "quantize": draw.choice(None, None, "int8", "fp8")}
    kind |= {"dtype": dtype}
    cache = draw.choice(_Dense, _Paged)(draw, case.B, (case.H_k, case.D), kind)
    how = {"rotary_style": draw.choice("half", "interleaved")}
    if case.D >= 4 and draw.chance(0.5):
        how["rotary"] = rotary_tables(3 * _SLOTS, 2 * (case.D // 4))
    held: dict[int, list[Token]] = {row: [] for row in cache.rows}
    for _ in range(draw.integer(2, 20)):
        rows = draw.some(cache.rows, draw.integer(1, len(cache.rows)))
        T = draw.integer(0, 6)
        if draw.chance(0.4):
            cache.change(draw, held, "rotary" in how)
        elif cache.fits(held, rows, T):
            _append(case, draw, cache, held, rows, T, how)
        cache.check(held)
    for row, tokens in held.items():
        _assert_holds(cache, row, tokens, how)


def _append(
    case: Case, draw: Draw, cache: Any, held: dict[int, list[Token]], rows: list[int], T: int,
    how: dict[str, Any],
) -> None:  # fmt: skip
    counts = draw.choice(None, draw.integers(-1, T + 1, len(rows)))
    dtype = cache.cache.dtype
    q, k, v = (
        draw.normal(len(rows), T, H, width).to(dtype).transpose(1, 2)
        for H, width in ((case.H_q, case.D), (case.H_k, case.D), (case.H_k, case.D_v))
    )
    given = {**how, "q": q} if "rotary" in how else how
    turned = cache.append(rows, k, v, counts, backend=case.backend, **given)
    for i, row in enumerate(rows):
        new = T if counts is None else min(max(int(counts[i]), 0), T)
        if turned is not None:
            alone = cache.make(1)
            _fill(alone, held[row], how)
            one = slice(i, i + 1)
            if new:
                expected = alone.append(k[one], v[one], backend="torch", **how, q=q[one])
                assert torch.equal(turned[one, :, :new], expected[:, :, :new]), "queries"
        held[row] += [(k[i, :, t], v[i, :, t]) for t in range(new)]


def _fill(cache: fastattn.KVCache, tokens: list[Token], how: dict[str, Any]) -> None:
    for k, v in tokens:
        cache.append(k[None, :, None], v[None, :, None], backend="torch", **how)


def _assert_holds(cache: Any, row: int, tokens: list[Token], how: dict[str, Any]) -> None:
    alone = cache.make(1)
    _fill(alone, tokens, how)
    theirs = [x[:, :, : len(tokens)] for x in alone.view().gather()[:2]]
    for layer in range(getattr(cache, "layers", 1)):
        view = cache.view(row, layer) if layer else cache.view(row)
        ours = [x[:, :, : len(tokens)] * (-1) ** layer for x in view.gather()[:2]]
        for name, x, y in zip(("k", "v"), ours, theirs, strict=True):
            assert torch.equal(x, y), f"{name} of row {row}: {int((x != y).sum())} numbers differ"
