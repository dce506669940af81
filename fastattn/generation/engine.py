"""Continuous batching: requests that come and go between steps, over one paged cache."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..cache.paged import OutOfPages
from ..models.gpt import GPT
from ..models.sampling import Sampling
from ..models.transfer import to_device
from ..quantization import Quantize
from .paged import layers_of
from .request import Request, choose_next, make_request
from .window import PastContext, Reading, check_past_context


@dataclass(eq=False)
class _Sequence:
    """A request, and how much of its text the cache holds."""

    request: Request
    reading: Reading
    unread: list[int]  # what of the reading's tokens is not in the cache
    row: int | None = None  # of the cache


class Engine:
    """Continues many prompts at once, each from the moment there is room for it.

    A `step` gives every running sequence its next token, in one
    pass of the model, and then lets waiting ones in, in the order of their arrival; each reads its
    prompt at once. A prompt that begins as the text of a running sequence does shares that part of
    its pages. What a request gets does not depend on the others: it is what `generate_tokens` gives
    for it alone, but for rounding.

    One thread at a time steps an engine; a second one is refused. Any thread may `submit`, `cancel`
    and ask whether the engine is `busy` at any time, also during a step, which takes note of it at
    its end at the latest.

    When the pool runs out of pages, the sequence that came last gives its pages back and waits at
    the head of the queue; once there is room it reads its text again and goes on.

    Args:
        model: in evaluation mode.
        num_pages: pages of the cache's pool.
        page_size: tokens a page holds, 1 to 256.
        max_batch: sequences that run at a time.
        quantize: store keys and values as "int8" or "fp8" codes; None: as they are. With codes the
            results differ from those without by more than rounding.
        past_context: what follows a full context, "restart" or "crop"; see `Reading`.

    Attributes:
        preemptions: how often a running sequence had to wait again.
        shared_tokens: tokens that were not read because a running sequence held them already.

    Example:
        >>> from fastattn.models.gpt import GPT, GPTConfig
        >>> engine = Engine(GPT(GPTConfig(vocab_size=50)).eval(), num_pages=32)
        >>> first = engine.submit([1, 2, 3], count=5)
        >>> events = engine.step()  # [(first, its first token)]
        >>> second = engine.submit([4], count=2)
        >>> for request, token in engine.run():
        ...     pass
        >>> len(first.tokens), len(second.tokens)
        (5, 2)
    """

    def __init__(
        self,
        model: GPT,
        *,
        num_pages: int,
        page_size: int = 16,
        max_batch: int = 8,
        quantize: Quantize | None = None,
        past_context: PastContext = "restart",
    ) -> None:
        check_past_context(past_context)
        self.model = model
        self.cache = model.new_paged_cache(
            num_pages, page_size, max_rows=max_batch, quantize=quantize
        )
        self.preemptions = 0
        self.shared_tokens = 0
        self._num_pages, self._max_batch = num_pages, max_batch
        self._past_context: PastContext = past_context
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order of their arrival
        # What other threads write; `_settle` alone reads it. Both ends of a deque are thread-safe.
        self._arrived: deque[_Sequence] = deque()
        self._cancelled: deque[Request] = deque()
        self._turn = threading.Lock()  # held for moments: to begin a step, to end it, to settle
        self._stepping: str | None = None  # name of the thread that is in a step
        self._device = next(model.parameters()).device

    @property
    def busy(self) -> bool:
        """Whether any request is not done."""
        return bool(self._arrived or self._waiting or self._running)

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        end_token: int | None = None,
    ) -> Request:
        """Adds a prompt to those that are to be continued.

        Args:
            prompt, count, sampling, seed, end_token: as for `generate_tokens`.

        Returns:
            The request: `tokens` grows with every step, `done` is True once it has all.

        Raises:
            ValueError: the pool is too small for this request even alone, or as `generate_tokens`.
        """
        request = make_request(
            self.model, prompt, count, sampling=sampling, seed=seed, end_token=end_token
        )
        if request.done:
            return request
        context = self.model.config.context_length
        # The last token is never read.
        pages = -(-min(len(prompt) + count - 1, context) // self.cache.page_size)
        if pages > self._num_pages:
            raise ValueError(
                f"num_pages must be at least {pages} for {len(prompt)} tokens and {count} more, "
                f"got {self._num_pages} pages of {self.cache.page_size} tokens"
            )
        reading = Reading(context, self._past_context)
        unread, _ = reading.enter(prompt)
        self._arrived.append(_Sequence(request, reading, unread))
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request with the tokens that it has; one that is done stays as it is.

        Its pages are free at once, or where a step is under way at its end.
        """
        request.done = True
        self._cancelled.append(request)
        with self._turn:
            if self._stepping is None:
                self._settle()

    @contextmanager
    def _step_alone(self) -> Iterator[None]:
        """Holds off other threads' steps, and settles before and after one's own."""
        name = threading.current_thread().name
        with self._turn:
            if self._stepping is not None:
                raise RuntimeError(
                    "one thread at a time steps an engine: "
                    f"thread {self._stepping!r} is in a step, thread {name!r} asked for another"
                )
            self._stepping = name
            self._settle()
        try:
            yield
        finally:
            with self._turn:
                self._settle()
                self._stepping = None

    def _settle(self) -> None:
        """Lets those that have arrived wait, and those that are cancelled leave."""
        while self._arrived:
            # First there, then gone: an engine with a request is busy at any moment.
            self._waiting.append(self._arrived[0])
            self._arrived.popleft()
        while self._cancelled:
            request = self._cancelled.popleft()
            request.done = True
            for sequence in [*self._running, *self._waiting]:
                if sequence.request is request:
                    self._leave(sequence)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Gives every running sequence its next token, and lets waiting ones in.

        Returns:
            (request, token) of every token added; none for one that its end token has ended.

        Raises:
            FloatingPointError: the model's scores are not finite.
            RuntimeError: another thread is in a step; nothing has changed then.
        """
        with self._step_alone():
            return self._step()

    def _step(self) -> list[tuple[Request, int]]:
        added: list[tuple[Request, int]] = []
        # A sequence that starts a new window reads half a context.
        for sequence in [s for s in self._running if len(s.unread) > 1]:
            added += self._read(self._make_room([sequence]))
        added += self._read(self._make_room([s for s in self._running if len(s.unread) == 1]))
        while self._waiting and len(self._running) < self._max_batch:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            added += self._read([sequence])
        return added

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until no request is left, yielding what the steps add."""
        while self.busy:
            yield from self.step()

    def _read(self, sequences: list[_Sequence]) -> list[tuple[Request, int]]:
        """Feeds the model what these have not read, as many tokens each, and adds the next ones."""
        if not sequences:
            return []
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        assert len(rows) == len(sequences)
        tokens = to_device([sequence.unread for sequence in sequences], self._device)
        logits = self.model(tokens, cache=layers_of(self.cache, rows), last_only=True)[:, -1]
        requests = [sequence.request for sequence in sequences]
        added = []
        for sequence, token in zip(sequences, choose_next(logits, requests), strict=True):
            request = sequence.request
            if not request.done and request.add(token):
                added.append((request, token))
            if request.done:
                self._leave(sequence)
                continue
            sequence.unread, forgotten = sequence.reading.enter([token])
            if forgotten:
                assert sequence.row is not None
                self.cache.truncate(sequence.row, 0)
        return added

    def _make_room(self, sequences: list[_Sequence]) -> list[_Sequence]:
        """Sets pages aside for what these have not read; returns those that still run then."""
        while True:
            wanted = {s.row: len(s.unread) for s in sequences if s.row is not None}
            try:
                self.cache.reserve(list(wanted), list(wanted.values()))
            except OutOfPages:
                # Never the only one, which `submit` has found to fit.
                assert len(self._running) > 1
                self._preempt(self._running[-1])
            else:
                return [sequence for sequence in sequences if sequence.row is not None]

    def _preempt(self, sequence: _Sequence) -> None:
        assert sequence.row is not None
        self._running.remove(sequence)
        self.cache.free(sequence.row)
        sequence.row = None
        sequence.unread = sequence.reading.tokens
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, sequence: _Sequence) -> bool:
        """Gives the first waiting sequence a row and pages for its text, if there is room.

        A page for each running sequence is left over, so that it is not sent away at once.
        """
        row, shared = self._shared_row(sequence)
        try:
            self.cache.reserve([row], [len(sequence.unread) - shared])
        except OutOfPages:
            self.cache.free(row)
            return False
        if self.cache.free_pages < len(self._running):
            self.cache.free(row)
            return False
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.row, sequence.unread = row, sequence.unread[shared:]
        self.shared_tokens += shared
        return True

    def _shared_row(self, sequence: _Sequence) -> tuple[int, int]:
        """A row that begins with as much of the sequence's text as a running one holds; how much.

        The last token is always read, since it says what follows; and less than a page is not worth
        the copy of it.
        """
        longest, source = 0, None
        for other in self._running:
            assert other.row is not None
            held = other.reading.tokens[: self.cache.length(other.row)]
            length = _common_prefix(held, sequence.unread[:-1])
            if length > longest:
                longest, source = length, other.row
        if source is None or longest < self.cache.page_size:
            return self.cache.allocate(), 0
        row = self.cache.fork(source)
        self.cache.truncate(row, longest)
        return row, longest

    def _leave(self, sequence: _Sequence) -> None:
        if sequence.row is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self.cache.free(sequence.row)
        sequence.row = None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
