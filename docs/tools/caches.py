"""Pictures of caches: which slot holds which token.

Keys are their positions, so the cache's memory shows the contents of slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn import KVCache, PagedKVCache

SIZE, LEFT, TOP = 30, 92, 26
SHARED, EMPTY = "#5c6bc0", "none"
# Of rows 0, 1, 2.
OWN = ("#e69f00", "#009e73", "#cc79a7")
Cell = tuple[str, str]


def positions(first: int, count: int, rows: int = 1) -> Tensor:
    """Keys [rows, 1, count, 1] that are their positions."""
    return torch.arange(first, first + count).float().view(1, 1, -1, 1).expand(rows, -1, -1, -1)


def draw(lines: list[tuple[str, list[list[Cell]]]], about: str) -> str:
    """A line of groups of cells for each entry, a label before it, and words on top."""
    parts = [f'<text x="4" y="16">{about}</text>']
    widest = 0.0
    for n, (label, groups) in enumerate(lines):
        y = TOP + n * (SIZE + 10)
        parts.append(f'<text x="4" y="{y + 20}">{label}</text>')
        x = float(LEFT)
        for group in groups:
            for text, fill in group:
                box = f'x="{x:g}" y="{y}" width="{SIZE}" height="{SIZE}"'
                parts.append(
                    f'<rect {box} fill="{fill}" fill-opacity="0.45" stroke="#808080"/>'
                    f'<text x="{x + SIZE / 2:g}" y="{y + 20}" text-anchor="middle">{text}</text>'
                )
                x += SIZE
            x += 8
        widest = max(widest, x, 8 + 7.2 * len(about))
    height = TOP + len(lines) * (SIZE + 10)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest:g}" height="{height}" '
        f'viewBox="0 0 {widest:g} {height}" font-size="13" fill="#808080" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif">{"".join(parts)}</svg>\n'
    )


def ring() -> str:
    """Slots of a ring after each of four chunks."""
    cache = KVCache(1, 1, max_length=12, head_dim=1, window=6, keep_first=2)
    lines = []
    for _ in range(4):
        begin = int(cache.lengths[0])
        cache.append(positions(begin, 5), positions(begin, 5))
        length = begin + 5
        cells: list[Cell] = []
        for slot in range(12):
            # The cache's position of a slot, or less than 0.
            at = int(cache.k[0, 0, slot, 0]) if slot < length else -1
            seen = length - 6 <= at or 0 <= at < 2
            fill = EMPTY if at < 0 else SHARED if seen else "#808080"
            cells.append((str(at) if at >= 0 else "", fill))
        lines.append((f"{length} tokens", [cells]))
    return draw(
        lines, "window=6, keep_first=2: the last token sees blue slots; grey ones are written next"
    )


def pages(pool: PagedKVCache, names: dict[int, str], about: str) -> str:
    """The pool's memory, and the table of each row."""
    count, size = pool.view(pool.rows).k.shape[0], pool.page_size
    holders = {p: [row for row in names if p in pool.pages(row)] for p in range(count)}
    owners = list(names)

    def colour(page: int) -> str:
        rows = holders[page]
        return EMPTY if not rows else OWN[owners.index(rows[0])] if len(rows) == 1 else SHARED

    def slots(page: int) -> Iterator[Cell]:
        for slot in range(size):
            used = any(
                pool.pages(row).index(page) * size + slot < pool.length(row)
                for row in holders[page]
            )
            at = pool.view(pool.rows).k[page, 0, slot, 0]
            yield str(int(at)) if used else "", colour(page)

    lines = [("pages", [list(slots(page)) for page in range(count)])]
    for row, name in names.items():
        lines.append((name, [[(str(page), colour(page)) for page in pool.pages(row)]]))
    return draw(lines, about)


def pool_of(num_pages: int) -> PagedKVCache:
    return PagedKVCache(num_pages, 4, 1, 1, max_rows=4, dtype=torch.float32)


def add(pool: PagedKVCache, rows: list[int], count: int) -> None:
    x = positions(pool.length(rows[0]), count, len(rows))
    pool.append(rows, x, x)


def caches() -> dict[str, str]:
    """Pictures of docs/decoding.md by their names."""
    apart = pool_of(6)
    rows = [apart.allocate(), apart.allocate()]
    add(apart, rows[:1], 6)
    add(apart, rows[1:], 3)
    add(apart, rows[:1], 4)
    forked = pool_of(6)
    rows = [forked.allocate()]
    add(forked, rows, 6)
    rows.append(forked.fork(rows[0]))
    add(forked, rows, 3)
    prefix = pool_of(6)
    first = prefix.allocate()
    add(prefix, [first], 8)
    answers = [first, prefix.fork(first), prefix.fork(first)]
    for n, row in enumerate(answers):
        add(prefix, [row], n + 1)
    names = {row: f"table {n}" for n, row in enumerate(answers)}
    return {
        "cache-ring.svg": ring(),
        "cache-pages.svg": pages(
            apart, {0: "table 0", 1: "table 1"}, "Two rows take pages of 4 slots as they grow"
        ),
        "cache-fork.svg": pages(
            forked,
            {rows[0]: "table 0", rows[1]: "table 1"},
            "A fork of 6 tokens and 3 more in each: full pages are shared, the last one is copied",
        ),
        "cache-prefix.svg": pages(
            prefix, names, "A prompt of 8 tokens, stored once, and three answers to it"
        ),
    }
