"""Judges of what caches hold after tokens came, were cut off, moved, forked and freed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import fastattn
from fastattn.cache_view import CacheView
from fastattn.rotary import rotary_tables
from fastattn.testing.calls import Draw
from fastattn.testing.decoding import Filled

from . import caches
from .cases import TAKES, Case, legal

_SLOTS = 24
_STEPS, _LONGEST = 20, 12
_POSITIONS = _STEPS * _LONGEST  # of a ring that grows at each
_ROWS = 4  # of a paged cache
Token = tuple[Tensor, ...]
Held = dict[int, list[Token]]


class Kind:
    """Widths of tokens and how they are stored, and caches of such tokens.

    latent: C and R of latents, or None.
    """

    def __init__(self, case: Case, draw: Draw) -> None:
        dtype = torch.float32 if case.dtype is torch.float64 else case.dtype
        self.how: dict[str, Any] = {"dtype": dtype, "quantize": draw.choice(None, "int8", "fp8")}
        self.latent = draw.choice(None, None, None, (draw.choice(8, 20), draw.choice(0, 4)))
        self.heads, self.D, self.D_v = case.H_k, case.D, case.D_v
        if self.latent is not None:
            self.heads, self.D, self.D_v = 1, sum(self.latent), self.latent[0]

    def dense(self, B: int, slots: int, **ring: Any) -> Any:
        if self.latent is not None:
            return fastattn.LatentCache(B, slots, *self.latent, **self.how)
        return fastattn.KVCache(
            B, self.heads, slots, self.D, value_dim=self.D_v, **self.how, **ring
        )

    def paged(self, pages: int, size: int, **rows: Any) -> Any:
        if self.latent is not None:
            return fastattn.PagedLatentCache(pages, size, *self.latent, **self.how, **rows)
        sizes = {"value_dim": self.D_v, **self.how, **rows}
        return fastattn.PagedKVCache(pages, size, self.heads, self.D, **sizes)

    def tokens(self, draw: Draw, B: int, T: int) -> tuple[Tensor, ...]:
        """k and v [B, H_k, T, ...], or latents."""
        widths = (self.D, self.D_v)[: 1 if self.latent else 2]
        made = (draw.normal(B, T, self.heads, width).transpose(1, 2) for width in widths)
        return tuple(x.to(self.how["dtype"]) for x in made)

    def alone(self, tokens: list[Token], how: dict[str, Any], room: int = 1) -> Any:
        """A cache of one row, with room for more, of these tokens."""
        cache = self.dense(1, len(tokens) + room)
        for token in tokens:
            cache.append(*(x[None, :, None] for x in token), backend="torch", **how)
        return cache


class _Dense:
    """A contiguous cache or a ring, whose rows are there from the start."""

    def __init__(self, draw: Draw, kind: Kind, B: int) -> None:
        rings = {"window": 5}, {"window": 5, "keep_first": 2}
        self.ring = draw.choice({}, *rings) if kind.latent is None else {}
        self.slots = 9 if self.ring else _SLOTS
        self.cache = kind.dense(B, self.slots, **self.ring)
        self.rows = list(range(B))
        # Of a ring: bounds on what rows hold, and held at most, and from where on each has all.
        self.bound = self.most = 0
        self.kept_from = [0] * B
        self.starts = [0] * B

    def fits(self, held: Held, rows: list[int], T: int) -> bool:
        return bool(self.ring) or max(len(held[row]) + T for row in rows) <= self.slots

    def append(
        self, rows: list[int], tokens: tuple[Tensor, ...], counts: Tensor | None, **how: Any
    ) -> Any:
        self.bound += tokens[0].shape[2]
        self.most = max(self.most, self.bound)
        index = None if rows == self.rows else torch.tensor(rows)
        return self.cache.append(*tokens, counts, batch_index=index, **how)

    def change(self, draw: Draw, held: Held, turned: bool) -> None:
        what = draw.choice("reorder", "truncate", "truncate", "truncate", "starts", "reset")
        if what == "reorder":
            index = draw.integers(0, len(self.rows) - 1, len(self.rows))
            self.cache.reorder(index)
            held |= dict(enumerate([list(held[i]) for i in index.tolist()]))
            self.kept_from = [self.kept_from[i] for i in index.tolist()]
            self.starts = [self.starts[i] for i in index.tolist()]
        elif what == "truncate":
            self._truncate(draw, held)
        elif what == "starts" and not self.ring:
            self.starts = [draw.integer(0, 3) for _ in self.rows]
            self.cache.set_starts(torch.tensor(self.starts))
        elif what == "reset" and draw.chance(0.5):
            self.cache.reset()
            held |= {row: [] for row in self.rows}
            self.bound = self.most = 0
            self.kept_from = self.starts = [0] * len(self.rows)

    def _truncate(self, draw: Draw, held: Held) -> None:
        most = max(map(len, held.values()))
        some = draw.integer(-1, _SLOTS), *(max(0, most - draw.integer(0, 6)) for _ in range(4))
        lengths = [draw.choice(*some) for _ in self.rows]
        if draw.chance(0.6):
            given = max(0, lengths[0])
            if self.ring and given:
                given = max(given, self.most - self.cache.max_step)
            lengths = [given] * len(self.rows)
            self.bound, self.most = min(self.bound, given), self.most if given else 0
            self.cache.truncate(given)
        else:
            if self.ring:  # whose lost tokens a tensor may not ask for
                lengths = [n if self.knows(row, n) else 0 for row, n in enumerate(lengths)]
            self.cache.truncate(torch.tensor(lengths))
        for row, n in enumerate(lengths):
            del held[row][max(0, n) :]
            self.kept_from[row] = self.kept_from[row] if held[row] else 0

    def knows(self, row: int, length: int, T: int = 0) -> bool:
        """Whether T queries in front of a length find their keys, and the next one."""
        oldest = self.kept_from[row]
        window, first = (self.ring.get(name, 0) for name in ("window", "keep_first"))
        return oldest <= first or length - max(T, 0) - window + 1 >= oldest

    def needed(self, row: int, length: int) -> list[int]:
        """Positions of the tokens that later queries see."""
        window, first = self.ring.get("window", length + 1), self.ring.get("keep_first", 0)
        seen = (t for t in range(length) if t < first or t > length - window)
        return [t for t in seen if t >= self.starts[row]]

    def view(self, rows: list[int]) -> CacheView:
        return self.cache.view(torch.tensor(rows))

    def check(self, held: Held) -> None:
        lengths = [len(held[row]) for row in self.rows]
        assert self.cache.lengths.tolist() == lengths, "lengths"
        uniform = self.cache.uniform_length
        assert uniform is None or lengths == [uniform] * len(lengths), "uniform_length"
        turning = self.slots - self.ring.get("keep_first", 0)
        for row, n in enumerate(lengths):
            self.kept_from[row] = max(self.kept_from[row], n - turning)
        oldest = self.most - self.cache.max_step
        if self.ring and 1 < oldest <= self.bound:
            says = f"must be 0 or at least {oldest}: the ring held {self.most} tok"
            _assert_refused(partial(self.cache.truncate, oldest - 1), says)


class _Paged:
    """Pages of a pool, with rows added and freed; a second layer holds the negative."""

    def __init__(self, draw: Draw, kind: Kind, B: int) -> None:
        self.page, self.layers = draw.choice(1, 3, 16), draw.choice(1, 1, 2)
        pages = _ROWS * -(-_SLOTS // self.page)
        self.cache = kind.paged(pages, self.page, max_rows=_ROWS, num_layers=self.layers)
        self.all = self.cache.free_pages
        self.rows = [self.cache.allocate() for _ in range(min(B, _ROWS))]

    def fits(self, held: Held, rows: list[int], T: int) -> bool:
        return max(len(held[row]) + T for row in rows) <= _SLOTS

    def append(
        self, rows: list[int], tokens: tuple[Tensor, ...], counts: Tensor | None, **how: Any
    ) -> Any:
        new = None if counts is None else counts.tolist()
        turned = self.cache.append(rows, *tokens, new, **how)
        if self.layers == 2:
            self.cache.append(rows, *(-x for x in tokens), new, layer=1, **how)
        return turned

    def change(self, draw: Draw, held: Held, turned: bool) -> None:
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

    def _compact(self, draw: Draw, row: int, held: Held) -> None:
        first = draw.integer(0, len(held[row]))
        kept = draw.some(list(range(first, len(held[row]))), draw.integer(0, 5))
        pages = self.cache.pages(row)[first // self.page :]
        others = {page for other in self.rows if other != row for page in self.cache.pages(other)}
        if first < len(held[row]) and others.intersection(pages):
            _assert_refused(partial(self.cache.compact, row, first, kept), "shares tokens from")
        else:
            self.cache.compact(row, first, kept)
            held[row][first:] = [held[row][t] for t in kept]

    def knows(self, row: int, length: int, T: int = 0) -> bool:
        return True

    def needed(self, row: int, length: int) -> list[int]:
        return list(range(length))

    def view(self, rows: list[int], layer: int = 0) -> CacheView:
        return self.cache.view(rows, layer)

    def check(self, held: Held) -> None:
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


def _assert_refused(call: Callable[[], object], says: str) -> None:
    try:
        call()
    except ValueError as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"accepted, not: {says}")


def judge(case: Case) -> None:
    """Each row holds what a new cache of that row alone holds, of the tokens that are left; and
    queries with drawn options see them.
    """
    draw = case.random("append")
    kind = Kind(case, draw)
    cache = draw.choice(_Dense, _Paged)(draw, kind, case.B)
    how: dict[str, Any] = {}
    if kind.latent is None:
        how["rotary_style"] = draw.choice("half", "interleaved")
        if case.D >= 4 and draw.chance(0.5):
            how["rotary"] = rotary_tables(_POSITIONS, 2 * (case.D // 4))
    held: Held = {row: [] for row in cache.rows}
    for _ in range(draw.integer(2, _STEPS)):
        rows = draw.some(cache.rows, draw.integer(1, len(cache.rows)))
        T = draw.integer(0, draw.choice(2, 6, _LONGEST))
        if draw.chance(0.4):
            cache.change(draw, held, "rotary" in how)
        elif cache.fits(held, rows, T):
            _append(case, draw, kind, cache, held, rows, T, how)
        cache.check(held)
    alone = {row: kind.alone(tokens, how) for row, tokens in held.items()}
    for row in held:
        _assert_holds(cache, row, alone[row])
    _decode(case, cache, kind, alone)


def _append(
    case: Case, draw: Draw, kind: Kind, cache: Any, held: Held, rows: list[int], T: int,
    how: dict[str, Any],
) -> None:  # fmt: skip
    counts = draw.choice(None, draw.integers(-1, T + 1, len(rows)))
    tokens = kind.tokens(draw, len(rows), T)
    q = draw.normal(len(rows), T, case.H_q, case.D).to(kind.how["dtype"]).transpose(1, 2)
    given = {**how, "q": q} if "rotary" in how else how
    turned = cache.append(rows, tokens, counts, backend=case.backend, **given)
    for i, row in enumerate(rows):
        new = T if counts is None else min(max(int(counts[i]), 0), T)
        if turned is not None and new:
            one = slice(i, i + 1)
            alone = kind.alone(held[row], how, T)
            expected = alone.append(*(x[one] for x in tokens), backend="torch", **how, q=q[one])
            assert torch.equal(turned[one, :, :new], expected[:, :, :new]), "queries"
        held[row] += [tuple(x[i, :, t] for x in tokens) for t in range(new)]


def _assert_holds(cache: Any, row: int, alone: Any) -> None:
    length = alone.uniform_length
    needed = cache.needed(row, length)
    theirs = alone.view().gather()
    for layer in range(getattr(cache, "layers", 1)):
        view = cache.view([row], layer) if layer else cache.view([row])
        k, v, positions = view.gather()
        slots = [positions[0].tolist().index(t) for t in needed]
        for name, x, y in zip(("k", "v"), (k, v), theirs, strict=False):
            x, y = x[:, :, slots] * (-1) ** layer, y[:, :, needed]
            assert torch.equal(x, y), f"{name} of row {row}: {int((x != y).sum())} numbers differ"


def _decode(case: Case, cache: Any, kind: Kind, alone: dict[int, Any]) -> None:
    """Judge a call of drawn options over some rows of the cache as it was left."""
    draw = case.random("decode")
    T_q = draw.choice(1, 1, 2, 3, 17)
    rings = getattr(cache, "ring", {})
    lengths = {row: x.uniform_length for row, x in alone.items()}
    T_q = min(T_q, cache.cache.max_step) if rings else T_q
    rows = [row for row in cache.rows if cache.knows(row, lengths[row], T_q)]
    if not rows:
        return
    case = legal(replace(
        case, call="decode_attention", T_q=T_q, H_k=kind.heads, D=kind.D, D_v=kind.D_v,
        B=draw.integer(1, len(rows)), dtype=kind.how["dtype"],
        options=tuple(draw.some(sorted(TAKES["decode_attention"]), draw.integer(0, 6))),
    ))  # fmt: skip
    rows = draw.some(rows, case.B)
    layer = draw.integer(0, getattr(cache, "layers", 1) - 1)
    view = cache.view(rows, layer) if layer else cache.view(rows)
    case = replace(case, T_k=max(1, view.length_bound))
    k, v = (
        torch.cat([_numbers(alone[row], name, case.T_k) for row in rows]) * (-1) ** layer
        for name in "kv"
    )
    masks: dict[str, Any] = {}
    if view.starts is not None:
        starts = torch.tensor([cache.starts[row] for row in rows])
        masks["key_padding_mask"] = torch.arange(case.T_k) >= starts[:, None]
    if rings:
        masks = {"window": (rings["window"] - 1, None), "keep_first": rings.get("keep_first", 0)}
    held = torch.tensor([lengths[row] for row in rows], dtype=torch.int32)
    filled = Filled(view, k, v, held, masks)
    caches.attend(case, draw, filled, {"backend": case.backend})


def _numbers(cache: Any, name: str, T: int) -> Tensor:
    """k or v [1, H_k, T, ...] of a plain cache, its codes as numbers, 0 past the last token."""
    n = cache.uniform_length
    x, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
    if scale is not None:
        x = x.float() * scale[..., None]
    return pad(x[:, :, :n], (0, 0, 0, T - n))
