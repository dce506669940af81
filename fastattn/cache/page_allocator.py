"""Page allocator: which pages each row owns, with reference counts for shared ones. No tensors.

Rows share pages after `fork` and `reorder`. A page's reference count is the number of its rows; at
0 the page returns to the pool. Shared pages are copy-on-write: `reserve` replaces them by own pages
before a write, and returns the copies to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than the call needs; nothing was changed.

    Attributes:
        needed, free: pages.
    """

    def __init__(self, needed: int, free: int, num_pages: int) -> None:
        super().__init__(
            f"the cache needs {needed} more pages, but {free} of its {num_pages} are free: "
            "free or truncate rows, or build it with more pages"
        )
        self.needed = needed
        self.free = free


class OutOfRows(RuntimeError):
    """Every row is in use; nothing was changed."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(
            f"all {max_rows} rows of the cache are in use: free one, or build it with more max_rows"
        )


@dataclass
class Changes:
    """Changes by a call, for the tensors that mirror the allocator.

    entries: (row, column) of the block table -> page. lengths: row -> tokens. copies: page to copy
    -> copy of it, as pairs.
    """

    entries: dict[tuple[int, int], int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    latest: int = 0  # tokens of the last `advance`, 0 after other changes


class PageAllocator:
    """Rows of tokens over a pool of pages.

    A row of n tokens uses the first pages of its list; `reserve` may have added more. Arguments are
    checked, and a call that raises changes nothing.

    Args:
        num_pages: pages of the pool.
        page_size: tokens a page holds.
        max_rows: rows at a time.
        max_pages: pages of one row.
    """

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_pages: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_rows = max_rows
        self.max_pages = max_pages
        # Free lists, taken from the end: initially the lowest number.
        self._free_pages = list(range(num_pages))[::-1]
        self._free_rows = list(range(max_rows))[::-1]
        self._holders = [0] * num_pages
        self._rows: dict[int, _Sequence] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no row holds."""
        return len(self._free_pages)

    @property
    def rows(self) -> list[int]:
        """The rows in use, oldest first."""
        return list(self._rows)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return self._row(row).length

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in order."""
        return list(self._row(row).pages)

    def latest(self, row: int) -> int:
        """Count the tokens of a row that the last `advance` added; 0 after any other change."""
        return self._row(row).latest

    def holders(self, page: int) -> int:
        """Number of rows that hold a page."""
        return self._holders[page]

    def allocate(self) -> int:
        """Allocate an empty row."""
        if not self._free_rows:
            raise OutOfRows(self.max_rows)
        row = self._free_rows.pop()
        self._rows[row] = _Sequence()
        return row

    def free(self, row: int) -> None:
        """Free a row, and its unshared pages."""
        self._release(self._row(row).pages)
        del self._rows[row]
        self._free_rows.append(row)

    def fork(self, row: int) -> tuple[int, Changes]:
        """A new row that shares all pages of `row`."""
        source = self._row(row)
        twin = self.allocate()
        pages = source.pages[: self._pages_for(source.length)]
        for page in pages:
            self._holders[page] += 1
        self._rows[twin] = _Sequence(pages, source.length)
        entries = {(twin, column): page for column, page in enumerate(pages)}
        return twin, Changes(entries=entries, lengths={twin: source.length})

    def truncate(self, row: int, length: int) -> Changes:
        """Keep at most the first `length` tokens; frees pages that hold none of them."""
        if length < 0:
            raise ValueError(f"length must be >= 0, got {length}")
        held = self._row(row)
        held.length, held.latest = min(held.length, length), 0
        keep = self._pages_for(held.length)
        self._release(held.pages[keep:])
        del held.pages[keep:]
        return Changes(lengths={row: held.length})

    def reorder(self, rows: Sequence[int], index: Sequence[int]) -> Changes:
        """Make rows[i] a fork of the former rows[index[i]]; no page is copied."""
        self._check_rows(rows)
        if len(index) != len(rows) or not all(0 <= i < len(rows) for i in index):
            raise ValueError(
                f"index must hold {len(rows)} numbers from 0 to {len(rows) - 1}, got {list(index)}"
            )
        sources = [self._rows[rows[i]] for i in index]
        held = [(list(s.pages[: self._pages_for(s.length)]), s.length) for s in sources]
        moved = [i for i, source in enumerate(index) if source != i]
        changes = Changes()
        for i in moved:
            for page in held[i][0]:
                self._holders[page] += 1
        for i in moved:
            self._release(self._rows[rows[i]].pages)
            pages, length = held[i]
            self._rows[rows[i]] = _Sequence(pages, length)
            changes.entries.update({(rows[i], column): p for column, p in enumerate(pages)})
            changes.lengths[rows[i]] = length
        return changes

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> Changes:
        """Give every row own pages for its next counts[i] tokens.

        Raises:
            OutOfPages: fewer pages are free than that takes.
            ValueError: a row is not in use or given twice, a count is negative, or a row would have
                more pages than the table has columns.
        """
        self._check_rows(rows)
        for row, count in zip(rows, counts, strict=True):
            if count < 0:
                raise ValueError(f"counts must be >= 0, got {count} for row {row}")
            if self._pages_for(self._rows[row].length + count) > self.max_pages:
                raise ValueError(
                    f"row {row} holds {self._rows[row].length} tokens and gets {count}: a row has "
                    f"room for max_pages_per_row * page_size = {self.max_pages * self.page_size}"
                )
        shared = self._shared_pages(rows, counts)
        extra = {}
        for row, count in zip(rows, counts, strict=True):
            held = self._rows[row]
            extra[row] = max(0, self._pages_for(held.length + count) - len(held.pages))
        needed = len(shared) + sum(extra.values())
        if needed > len(self._free_pages):
            raise OutOfPages(needed, len(self._free_pages), self.num_pages)
        changes = Changes()
        for row, column in shared:
            old = self._rows[row].pages[column]
            self._release([old])
            new = self._take()
            self._rows[row].pages[column] = changes.entries[row, column] = new
            changes.copies.append((old, new))
        for row, count in extra.items():
            pages = self._rows[row].pages
            for _ in range(count):
                changes.entries[row, len(pages)] = page = self._take()
                pages.append(page)
        return changes

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Add tokens written into reserved pages to the lengths.

        Raises:
            ValueError: a row is not in use or given twice, a count is negative, or tokens were not
                reserved.
        """
        self._check_rows(rows)
        for row, count in zip(rows, counts, strict=True):
            room = len(self._rows[row].pages) * self.page_size - self._rows[row].length
            if not 0 <= count <= room:
                raise ValueError(
                    f"counts must be from 0 to the reserved {room} for row {row}, got {count}"
                )
        for row, count in zip(rows, counts, strict=True):
            self._rows[row].length += count
            self._rows[row].latest = count

    def _row(self, row: int) -> _Sequence:
        if row not in self._rows:
            raise ValueError(f"row must be one in use, got {row}")
        return self._rows[row]

    def _check_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._row(row)
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows must differ from each other, got {list(rows)}")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _shared_pages(self, rows: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """(row, column) of pages to copy before these rows are written.

        Only the page of a row's next token can be shared; the last of its rows to write keeps it.
        """
        left: dict[int, int] = {}
        shared = []
        for row, count in zip(rows, counts, strict=True):
            held = self._rows[row]
            column = held.length // self.page_size
            if count == 0 or column >= len(held.pages):
                continue
            page = held.pages[column]
            left.setdefault(page, self._holders[page])
            if left[page] > 1:
                left[page] -= 1
                shared.append((row, column))
        return shared

    def _take(self) -> int:
        page = self._free_pages.pop()
        self._holders[page] = 1
        return page

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was freed twice"
            if self._holders[page] == 0:
                self._free_pages.append(page)
