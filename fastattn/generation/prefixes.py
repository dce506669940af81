"""Prefixes: rows that finished requests leave in a paged cache, for prompts that begin alike, and
rows of a step that begin with the same pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from ..cache.paged import PagedKVCache


class Prefixes:
    """Rows of a cache that nobody continues: whole pages of text, the least recently used first.

    Found by what their first page holds. Rows that begin alike share pages, as `fork` does.

    Args:
        cache: whose pages they hold.
        most: how many rows are kept.
    """

    def __init__(self, cache: PagedKVCache, most: int) -> None:
        self._cache, self._most = cache, most
        self._texts: OrderedDict[int, list[int]] = OrderedDict()
        self._by_first_page: dict[tuple[int, ...], dict[int, None]] = {}

    @property
    def rows(self) -> list[int]:
        """The rows that are kept."""
        return list(self._texts)

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Take over a row, which holds these tokens; what is known already is freed."""
        size = self._cache.page_size
        text = list(tokens[: len(tokens) - len(tokens) % size])
        _, known = self.find(text)
        if not self._most or known == len(text):
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
        """The row that begins with most of a text, which is used now, and with how many tokens."""
        longest, best = 0, None
        for row in self._alike(tokens):
            length = common_prefix(self._texts[row], tokens)
            if length > longest:
                longest, best = length, row
        if best is not None:
            self._texts.move_to_end(best)
        return best, longest

    def give_back(self) -> bool:
        """Free the last page of the row that has not been used for longest; whether there was one.

        A page that others hold too is not free then.
        """
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
        """Rows whose first page is that of a text."""
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
    """Groups of rows whose common first pages are better read once for all of them in a step.

    Each row that does not read them itself saves their bytes; what the queries of the group find in
    them is written, read again and merged.

    Args:
        counts: new tokens of each row, before they are counted.
        num_heads: query heads H_q.

    Returns:
        numbers of rows in an order in which those of a group are neighbours, and the groups come
        first; where each group begins, and the last one ends; and the tokens that each shares.
    """
    size, (H_k, _, D), D_v = cache.page_size, cache.k.shape[2:], cache.v.shape[4]
    scales = 0 if cache.k_scale is None else 8
    of_token = H_k * (cache.k.element_size() * (D + D_v) + scales)
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
        # So many pages that those who have them in common save most.
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
    """How many tokens two texts begin with in common."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
