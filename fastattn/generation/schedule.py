"""Which sequences a step of an engine reads, how much of each, and whose pages they get."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..cache.paged import OutOfPages, PagedKVCache
from .prefixes import Prefixes, common_prefix
from .request import Request
from .window import Reading


@dataclass(eq=False)
class Entry:
    """A request, and how much of its text the cache holds."""

    request: Request
    reading: Reading
    unread: list[int]  # what of the reading's tokens is not in the cache
    arrival: int
    row: int | None = None  # of the cache

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller for those that go first: by priority, then by arrival."""
        return -self.request.priority, self.arrival


class Schedule:
    """The sequences of an engine, those that run and those that wait, and their rows of a cache.

    Args:
        cache: whose rows and pages they get.
        max_batch, max_step_tokens, kept_rows: as for `Engine`.

    Attributes:
        running, waiting: in the order of their rank.
        kept: what finished ones have left.
        preemptions, shared_tokens: as of `Engine`.
    """

    def __init__(
        self, cache: PagedKVCache, max_batch: int, max_step_tokens: int | None, kept_rows: int
    ) -> None:
        self.cache = cache
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.kept = Prefixes(cache, kept_rows)
        self.preemptions = self.shared_tokens = 0
        self._max_batch, self._max_step_tokens = max_batch, max_step_tokens
        self._arrivals = 0

    def enter(self, sequence: Entry) -> None:
        """A new sequence waits, behind those that came before it."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._wait(sequence)

    def _wait(self, sequence: Entry) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def pages_in_use(self) -> int:
        """How many pages running sequences hold."""
        rows = [sequence.row for sequence in self.running if sequence.row is not None]
        return len({page for row in rows for page in self.cache.pages(row)})

    def plan(self) -> dict[Entry, int]:
        """Which sequences the next step reads, and how many tokens of each; there is room then."""
        left = self._max_step_tokens
        plan: dict[Entry, int] = {}

        def share(unread: int) -> int:
            return unread if left is None else min(unread, left)

        # First those that wait for one token alone: a step has room for all of them.
        for one in sorted(self.running, key=lambda s: (len(s.unread) > 1, s.rank)):
            count = share(len(one.unread))
            if one.row is not None and count and self._make_room(one, count, plan):
                plan[one] = count
                left = None if left is None else left - count
        put_off: set[Entry] = set()
        while left != 0:
            sequence = next((s for s in self.waiting if s not in put_off), None)
            if sequence is None or not self._may_run(sequence, plan):
                break
            match = self._shared(sequence)
            if match is None:
                put_off.add(sequence)
                continue
            source, shared = match
            count = share(len(sequence.unread) - shared)
            if not self._admit(sequence, source, shared, count, plan):
                break
            plan[sequence] = count
            left = None if left is None else left - count
        return plan

    def _make_room(self, sequence: Entry, count: int, plan: dict[Entry, int]) -> bool:
        """Sets pages aside for a running sequence's next tokens; False: it has to wait instead."""
        while sequence.row is not None:
            try:
                self.cache.reserve([sequence.row], [count])
            except OutOfPages:
                if not self.kept.give_back():
                    # Never the only one, which `submit` has found to fit.
                    assert len(self.running) > 1
                    self._send_away(self.running[-1], plan)
            else:
                return True
        return False

    def _may_run(self, sequence: Entry, plan: dict[Entry, int]) -> bool:
        """Whether there is a place, which one of a lower priority has to leave if there is none."""
        if len(self.running) < self._max_batch:
            return True
        last = self.running[-1]
        if last.request.priority >= sequence.request.priority:
            return False
        self._send_away(last, plan)
        return True

    def _shared(self, sequence: Entry) -> tuple[int | None, int] | None:
        """The row that holds most of the beginning of a waiting sequence's text, and how much.

        None: a running one will hold a page more of it when its prompt is read, so that to wait is
        less work. The last token is always read, since it says what follows; and less than a page
        is not worth the copy of it.
        """
        text = sequence.unread[:-1]
        source, longest = self.kept.find(text)
        promised = longest
        for other in self.running:
            assert other.row is not None
            length = common_prefix(other.reading.tokens, text)
            promised = max(promised, length)
            length = min(length, self.cache.length(other.row))
            if length > longest:
                longest, source = length, other.row
        if promised - longest >= self.cache.page_size:
            return None
        return (None, 0) if longest < self.cache.page_size else (source, longest)

    def _admit(
        self, sequence: Entry, source: int | None, shared: int, count: int,
        plan: dict[Entry, int],
    ) -> bool:  # fmt: skip
        """Gives a waiting sequence a row and pages for its next tokens, if there is room.

        A page for each running sequence is left over, so that it is not sent away at once.
        """
        row = self.cache.allocate() if source is None else self.cache.fork(source)
        self.cache.truncate(row, shared)
        while not self._fits(row, count):
            last = self.running[-1] if self.running else None
            if self.kept.give_back():
                continue
            if last is None or last.request.priority >= sequence.request.priority:
                self.cache.free(row)
                return False
            self._send_away(last, plan)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.rank)
        sequence.row, sequence.unread = row, sequence.unread[shared:]
        self.shared_tokens += shared
        return True

    def _fits(self, row: int, count: int) -> bool:
        """Whether a row has pages for its next tokens, and one is left for each running one."""
        try:
            self.cache.reserve([row], [count])
        except OutOfPages:
            return False
        return self.cache.free_pages >= len(self.running)

    def _send_away(self, sequence: Entry, plan: dict[Entry, int]) -> None:
        plan.pop(sequence, None)
        self.preempt(sequence)

    def preempt(self, sequence: Entry) -> None:
        """Takes a running sequence's pages; it waits again."""
        assert sequence.row is not None
        self.running.remove(sequence)
        self.cache.free(sequence.row)
        sequence.row = None
        sequence.unread = sequence.reading.tokens
        self._wait(sequence)
        self.preemptions += 1

    def leave(self, sequence: Entry) -> None:
        """Ends a sequence; what it has computed is kept."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.kept.keep(sequence.row, sequence.reading.tokens[: self.cache.length(sequence.row)])
        sequence.row = None
