"""Scheduler of the engine: sequences of a step, tokens of each, and pages."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..cache.paged import OutOfPages, PagedKVCache
from .prefixes import Prefixes, common_prefix
from .request import Request
from .window import Reading

# Steps by which a request of priority 1 may come later than one of 0 and go first. Finite, so that
# steady requests of higher priority keep none waiting for ever.
HEAD_START = 16


@dataclass(eq=False)
class Entry:
    """A request, and its state in the cache."""

    request: Request
    reading: Reading
    unread: list[int]  # tokens of the reading that are not in the cache
    arrival: int
    entered: int = 0  # steps before it came
    row: int | None = None  # of the cache

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: by step of arrival less the priority's head start, then by arrival."""
        return self.entered - HEAD_START * self.request.priority, self.arrival

    def gives_way_to(self, other: Entry) -> bool:
        """Whether it is preempted for one of higher priority, unless it came so much earlier."""
        return self.request.priority < other.request.priority and self.rank > other.rank


class Schedule:
    """Running and waiting sequences of an engine, and their cache rows.

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
        self._arrivals = self._steps = 0

    def enter(self, sequence: Entry) -> None:
        """Queue a new sequence."""
        sequence.arrival, sequence.entered = self._arrivals, self._steps
        self._arrivals += 1
        self._wait(sequence)

    def _wait(self, sequence: Entry) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def plan(self) -> dict[Entry, int]:
        """Plan a step: sequences, and tokens of each, with pages reserved."""
        self._steps += 1
        left = self._max_step_tokens
        plan: dict[Entry, int] = {}

        def share(unread: int) -> int:
            return unread if left is None else min(unread, left)

        # First sequences with a single unread token, which always fit in a step.
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
            if (match := self._shared(sequence)) is None:
                put_off.add(sequence)
                continue
            count = share(len(sequence.unread) - match[1])
            if not self._admit(sequence, *match, count, plan):
                break
            plan[sequence] = count
            left = None if left is None else left - count
        return plan

    def _make_room(self, sequence: Entry, count: int, plan: dict[Entry, int]) -> bool:
        """Reserve pages for a running sequence's next tokens; False: it is preempted instead."""
        while sequence.row is not None:
            try:
                self.cache.reserve([sequence.row], [count])
            except OutOfPages:
                if not self.kept.give_back():
                    # Never the only one, which `submit` has checked to fit.
                    assert len(self.running) > 1
                    self._send_away(self.running[-1], plan)
            else:
                return True
        return False

    def _may_run(self, sequence: Entry, plan: dict[Entry, int]) -> bool:
        """Whether a sequence may run, if necessary by preempting one of lower priority."""
        if len(self.running) < self._max_batch:
            return True
        last = self.running[-1]
        if not last.gives_way_to(sequence):
            return False
        self._send_away(last, plan)
        return True

    def _shared(self, sequence: Entry) -> tuple[int | None, int] | None:
        """The row with the longest prefix of a waiting sequence's text, and its length.

        None: wait, as a running sequence will hold a page more of it after its prompt. The last
        token is always read, for its scores; less than a page is not worth copying.
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
        """Give a waiting sequence a row and pages, if that leaves a page for each running one."""
        row = self.cache.allocate() if source is None else self.cache.fork(source)
        self.cache.truncate(row, shared)
        while not self._fits(row, count):
            last = self.running[-1] if self.running else None
            if self.kept.give_back():
                continue
            if last is None or not last.gives_way_to(sequence):
                self.cache.free(row)
                return False
            self._send_away(last, plan)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.rank)
        sequence.row, sequence.unread = row, sequence.unread[shared:]
        self.shared_tokens += shared
        return True

    def _fits(self, row: int, count: int) -> bool:
        """Whether there are pages for a row's next tokens, and one for each running sequence."""
        try:
            self.cache.reserve([row], [count])
        except OutOfPages:
            return False
        return self.cache.free_pages >= len(self.running)

    def _send_away(self, sequence: Entry, plan: dict[Entry, int]) -> None:
        plan.pop(sequence, None)
        self.preempt(sequence)

    def preempt(self, sequence: Entry) -> None:
        """Free a running sequence's pages, and queue it again."""
        assert sequence.row is not None
        self.running.remove(sequence)
        self.cache.free(sequence.row)
        sequence.row = None
        sequence.unread = sequence.reading.tokens
        self._wait(sequence)
        self.preemptions += 1

    def leave(self, sequence: Entry) -> None:
        """Remove a finished sequence, and keep its pages."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.kept.keep(sequence.row, sequence.reading.tokens[: self.cache.length(sequence.row)])
        sequence.row = None
