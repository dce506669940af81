"""Continuous batching over one paged cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from ..cache.latent import LatentQuantize
from ..checks import check_count, check_int
from ..models.gpt import GPT
from ..models.sampling import Sampling
from ..models.stack import evaluating
from ..models.transfer import to_device
from .graph import PagedGraphs
from .paged import layers_of
from .prefixes import sharing
from .request import EngineMetrics, Request, choose_next, make_request
from .schedule import Entry, Schedule
from .window import PastContext, Reading, check_past_context


class Engine:
    """Serves many generation requests at once, each as soon as there is room.

    A `step` is one pass of the model over packed tokens, without padding: the latest token of every
    running sequence, and as much of new prompts as `max_step_tokens` permits, by priority, then by
    arrival. A request's result does not depend on others: it equals `generate_tokens`, up to
    rounding.

        step, at most 8 tokens   1          2          3          4
        first: 5 tokens          prompt 5   +1         +1         +1
        second: 12 tokens        3 of 12    7 of 12    2 of 12    +1
        third: 4 tokens                                4          +1

    Pages of finished sequences are kept: a prompt that begins like the text of a running or
    finished sequence shares these pages, and on a GPU a step reads pages shared by many sequences
    once if that is fewer bytes, except for models with a window, biases by distance or
    batch_invariant. Kept pages are evicted for new tokens, least recently used first.
    If that is not enough, the last sequence is preempted: it releases its pages and waits, and
    later reads its text again. A request of higher priority likewise preempts a running one of
    lower priority. A unit of priority is a head start of 16 steps: what has waited longer goes
    before later requests of higher priority, so that none waits for ever.

    Only one thread at a time may step an engine. Any thread may `submit`, `cancel` and read `busy`
    at any time, also during a step, at whose end they take effect at the latest.

    Args:
        model: run in evaluation mode.
        num_pages: pages of the cache's pool.
        page_size: tokens a page holds, 1 to 256.
        max_batch: most running sequences.
        max_step_tokens: most tokens of a step, at least max_batch, which bounds the delay by a long
            prompt; None: prompts are read whole.
        kept_rows: number of finished texts kept for prompts with equal beginnings; default 4 *
            max_batch. 0: none.
        quantize: store keys and values as "int8" or "fp8" codes, and latents as `LatentCache` does,
            which changes results by more than rounding; None: unquantised.
        past_context: behaviour at a full context, "restart" or "crop"; see `Reading`.
        cuda_graph: replay steps of one token a sequence as CUDA graphs; see `PagedGraphs`.

    Raises:
        TypeError, ValueError: a number is invalid or too small; cuda_graph is True without a CUDA
            device.

    Examples:
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
        max_step_tokens: int | None = None,
        kept_rows: int | None = None,
        quantize: LatentQuantize | None = None,
        past_context: PastContext = "restart",
        cuda_graph: bool = False,
    ) -> None:
        check_past_context(past_context)
        max_batch = check_count("max_batch", max_batch, 1)
        if max_step_tokens is not None:
            max_step_tokens = check_count("max_step_tokens", max_step_tokens, max_batch)
        kept_rows = 4 * max_batch if kept_rows is None else check_count("kept_rows", kept_rows, 0)
        self.model = model
        self.cache = model.new_paged_cache(
            num_pages, page_size, max_rows=max_batch + kept_rows, quantize=quantize
        )
        self._graphs = PagedGraphs(model, self.cache, max_batch) if cuda_graph else None
        self._num_pages = num_pages
        self._past_context: PastContext = past_context
        self._schedule = Schedule(self.cache, max_batch, max_step_tokens, kept_rows)
        self._steps = self._read_tokens = self._new_tokens = 0
        self._seconds = 0.0
        self._first_token_seconds: deque[float] = deque(maxlen=1000)
        # Written by other threads, read only by `_settle`. Deques are thread-safe at both ends.
        self._arrived: deque[Entry] = deque()
        self._cancelled: deque[Request] = deque()
        self._turn = threading.Lock()  # held briefly: to begin a step, to end it, to settle
        self._stepping: str | None = None  # name of the thread that is in a step
        self._device = next(model.parameters()).device
        # On a CPU torch's fused attention returns no lse for merging, and its formula is slower.
        self._shares = self._device.type != "cpu"

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        return self._schedule.preemptions

    @property
    def shared_tokens(self) -> int:
        """Tokens that were not read because the cache already held them."""
        return self._schedule.shared_tokens

    @property
    def busy(self) -> bool:
        """Whether any request is not done."""
        return bool(self._arrived or self._schedule.waiting or self._schedule.running)

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        end_token: int | Collection[int] | None = None,
        priority: int = 0,
    ) -> Request:
        """Submit a request.

        Args:
            prompt, count, sampling, seed, end_token: as for `generate_tokens`.
            priority: higher first, 16 steps ahead a unit.

        Returns:
            The request: `tokens` grows with every step, `done` is True at the end.

        Raises:
            TypeError: priority is no int.
            ValueError: the pool is too small for this request alone, or as `generate_tokens`.
        """
        priority = check_int("priority", priority)
        request = make_request(
            self.model, prompt, count, sampling=sampling, seed=seed, end_token=end_token
        )
        request.priority = priority
        if request.done:
            return request
        context = self.model.config.context_length
        # The last token is not read.
        read = len(request.prompt)
        pages = -(-min(read + count - 1, context) // self.cache.page_size)
        if pages > self._num_pages:
            raise ValueError(
                f"num_pages must be at least {pages} for {read} tokens and {count} more, "
                f"got {self._num_pages} pages of {self.cache.page_size} tokens"
            )
        reading = Reading(context, self._past_context)
        unread, _ = reading.enter(request.prompt)
        request.submitted = time.perf_counter()
        self._arrived.append(Entry(request, reading, unread, 0))
        return request

    def cancel(self, request: Request) -> None:
        """End a request with its present tokens, if it is not done.

        Its pages are freed at once, or at the end of a running step.
        """
        request.done = True
        self._cancelled.append(request)
        with self._turn:
            if self._stepping is None:
                self._settle()

    @contextmanager
    def _step_alone(self) -> Iterator[None]:
        """Exclude other threads' steps, and settle before and after the step."""
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
        """Queue submitted requests, and remove cancelled ones."""
        while self._arrived:
            # Add before removing, so that an engine with a request is always busy.
            self._schedule.enter(self._arrived[0])
            self._arrived.popleft()
        while self._cancelled:
            request = self._cancelled.popleft()
            request.done = True
            for sequence in [*self._schedule.running, *self._schedule.waiting]:
                if sequence.request is request:
                    self._schedule.leave(sequence)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Read one batch of tokens, and add a token to each sequence that is read to its end.

        Returns:
            (request, token) of every added token, without end tokens.

        Raises:
            FloatingPointError: the model's scores are not finite. After any error, the step's
                sequences have released their pages and wait to be read again, except cancelled
                ones.
            RuntimeError: another thread is in a step; then nothing is changed.
        """
        with self._step_alone():
            began = time.perf_counter()
            added = self._read(self._schedule.plan())
            self._seconds += time.perf_counter() - began
            self._steps += 1
            return added

    def run(self) -> Iterator[tuple[Request, int]]:
        """Step until no request is left, yielding the added tokens."""
        while self.busy:
            yield from self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """Yield the tokens of one request as generated; the steps serve other requests too."""
        sent = 0
        while True:
            yield from request.tokens[sent:]
            sent = len(request.tokens)
            if request.done:
                return
            self.step()

    def forget(self) -> None:
        """Free the pages kept for future prompts.

        Raises:
            RuntimeError: another thread is in a step.
        """
        with self._step_alone():
            self._schedule.kept.clear()

    def metrics(self) -> EngineMetrics:
        """Counts and times so far."""
        schedule, waits = self._schedule, list(self._first_token_seconds)
        rows = [sequence.row for sequence in schedule.running if sequence.row is not None]
        in_use = len({page for row in rows for page in self.cache.pages(row)})
        return EngineMetrics(
            steps=self._steps,
            read_tokens=self._read_tokens,
            new_tokens=self._new_tokens,
            shared_tokens=schedule.shared_tokens,
            preemptions=schedule.preemptions,
            running=len(schedule.running),
            waiting=len(schedule.waiting) + len(self._arrived),
            pages_in_use=in_use,
            pages_kept=self._num_pages - self.cache.free_pages - in_use,
            seconds=self._seconds,
            first_token_seconds=sum(waits) / len(waits) if waits else None,
        )

    def _read(self, plan: dict[Entry, int]) -> list[tuple[Request, int]]:
        """Run the plan, and add the next tokens of completely read texts."""
        if not plan:
            return []
        try:
            ready = [s for s, count in plan.items() if count == len(s.unread)]
            # If none is read to its end, the last, to have at least one row.
            with evaluating(self.model):
                logits = self._scores(plan, ready or list(plan)[-1:])
            chosen = choose_next(logits, [s.request for s in ready]) if ready else []
        except BaseException:
            for sequence in plan:
                self._schedule.preempt(sequence)
            raise
        self._read_tokens += sum(plan.values())
        for sequence, count in plan.items():
            sequence.unread = sequence.unread[count:]
        return self._add(ready, chosen)

    def _scores(self, plan: dict[Entry, int], whole: list[Entry]) -> torch.Tensor:
        """Scores [N, V] after the read tokens of these N sequences, from one packed pass."""
        graph = self._graphs if len(whole) == len(plan) and max(plan.values()) == 1 else None
        shared: tuple[list[int], list[int]] | None = None
        if self._shares:
            # Rows that share pages become adjacent.
            rows = [sequence.row for sequence in plan if sequence.row is not None]
            heads, items = self.model.config.num_heads, list(plan.items())
            order, bounds, lengths = sharing(self.cache, rows, list(plan.values()), heads)
            plan = dict(items[i] for i in order)
            shared = (bounds, lengths) if lengths else None
        rows = [sequence.row for sequence in plan if sequence.row is not None]
        counts = list(plan.values())
        tokens = [token for s, count in plan.items() for token in s.unread[:count]]
        ends = dict(zip(plan, accumulate(counts), strict=True))
        last = to_device([ends[sequence] - 1 for sequence in whole], self._device)
        if graph is not None:
            scores = graph.scores(tokens, rows, shared)
            return scores if shared is None else scores[last]
        layers = layers_of(self.cache, rows, counts, shared=shared)
        packed = to_device(tokens, self._device)[:, None]
        return self.model(packed, cache=layers, rows=last)[0][:, -1]

    def _add(self, sequences: list[Entry], tokens: list[int]) -> list[tuple[Request, int]]:
        """Add each sequence's next token, and remove finished sequences."""
        added = []
        for sequence, token in zip(sequences, tokens, strict=True):
            request = sequence.request
            if not request.done and request.add(token):
                added.append((request, token))
                self._new_tokens += 1
                if len(request.tokens) == 1:
                    self._first_token_seconds.append(time.perf_counter() - request.submitted)
            if request.done:
                self._schedule.leave(sequence)
                continue
            sequence.unread, forgotten = sequence.reading.enter([token])
            if forgotten:
                assert sequence.row is not None
                self.cache.truncate(sequence.row, 0)
        return added
