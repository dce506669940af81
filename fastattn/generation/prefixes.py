"""Shared prefixes: rows of finished requests, kept for prompts with equal beginnings, and rows of a
step with common first pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from ..cache.paged import PagedKVCache


class Prefixes:
    """Kept rows of whole pages, least recently used first.

    Indexed by their first page. Rows with equal beginnings share pages.

    Args:
        cache: whose pages they hold.
        most: most rows.
    """

    def __init__(self, cache: PagedKVCache, most: int) -> None:
        self._cache, self._most = cache, most
        self._texts: OrderedDict[int, list[int]] = OrderedDict()
        self._by_first_page: dict[tuple[int, ...], dict[int, None]] = {}

    @property
    def rows(self) -> list[int]:
        """The kept rows."""
        return list(self._texts)

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Take over a row of these tokens; free it if its text is already kept."""
        size = self._cache.page_size
        text = list(tokens[: len(tokens) - len(tokens) % size])
        _, length = self.find(text)
        if not self._most or length == len(text):
            self._cache.free(row)
            return
        for other in self._alike(text):
            held = self._texts[other]
            if held == text[: len(held)]:
                self._drop(other)
        if len(self._texts) == self._most:
            self._drop(next(iter(self._texts)))
        self._cache.truncate(row, len(text))
        self._texts[row] = text
        self._by_first_page.setdefault(tuple(text[:size]), {})[row] = None

    def find(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The row with the longest common prefix with a text, marked as used, and its length."""
        common = {row: common_prefix(self._texts[row], tokens) for row in self._alike(tokens)}
        best = max(common, key=common.__getitem__, default=None)
        if best is None:
            return None, 0
        self._texts.move_to_end(best)
        return best, common[best]

    def give_back(self) -> bool:
        """Free the last page, unless shared, of the least recently used row, if there is one."""
        if not self._texts:
            return False
        row, text = next(iter(self._texts.items()))
        size = self._cache.page_size
        if len(text) <= size:
            self._drop(row)
        else:
            del text[-size:]
            self._cache.truncate(row, len(text))
        return True

    def clear(self) -> None:
        """Free all rows."""
        for row in self.rows:
            self._drop(row)

    def _alike(self, tokens: Sequence[int]) -> list[int]:
        """Rows with a text's first page."""
        return list(self._by_first_page.get(tuple(tokens[: self._cache.page_size]), ()))

    def _drop(self, row: int) -> None:
        first_page = tuple(self._texts.pop(row)[: self._cache.page_size])
        del self._by_first_page[first_page][row]
        if not self._by_first_page[first_page]:
            del self._by_first_page[first_page]
        self._cache.free(row)


def sharing(
    cache: PagedKVCache, rows: Sequence[int], counts: Sequence[int], num_heads: int
) -> tuple[list[int], list[int], list[int]]:
    """Groups of rows whose common first pages are better read once per step.

    Each other row saves their bytes, but the group's partial results are written, read again and
    merged. counts: new tokens of each row, not yet counted.

    Returns:
        numbers of rows, groups first and each group's rows adjacent; offsets of the groups; and the
        shared tokens of each.
    """
    size, D, D_v = cache.page_size, cache.head_dim, cache.v.shape[4]
    slots = cache.num_layers * cache.k.shape[1] * size
    of_token = sum(x.nbytes for x in cache.stored_tensors) // slots
    of_query = num_heads * cache.dtype.itemsize * (D + 4 * D_v)
    alike: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if cache.length(row) >= size:
            alike.setdefault(cache.pages(row)[0], []).append(i)
    order: list[int] = []
    bounds, lengths = [0], []
    for group in alike.values():
        if len(group) == 1:
            continue
        pages = [cache.pages(rows[i])[: cache.length(rows[i]) // size] for i in group]
        longest = max(pages, key=len)
        # Rows fork and grow at their ends: those that share a page share all before it.
        common = [bisect_left(range(len(x)), True, key=lambda i: x[i] != longest[i]) for x in pages]
        # The number of common pages with the largest saving.
        most = max(common, key=lambda n: n * (sum(m >= n for m in common) - 1))
        group = [i for i, n in zip(group, common, strict=True) if n >= most]
        tokens = size * most
        saved = (len(group) - 1) * tokens * of_token
        if saved > sum(counts[i] for i in group) * of_query:
            order += group
            bounds.append(len(order))
            lengths.append(tokens)
    grouped = set(order)
    order += [i for i in range(len(rows)) if i not in grouped]
    return order, bounds, lengths


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))
