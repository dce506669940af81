"""Continuous batching: one GPT serves many requests from one paged KV cache.

pip install ".[gpt]"
fastattn train --out runs/gpt                            # a model, once
python examples/engine.py --checkpoint runs/gpt "def main(" "class Token" "import "

A step is one pass of the model over packed tokens, without padding: the latest token of every text
that is being written, and as much of new prompts as a step may read besides.

    step, at most 8 tokens   1          2          3          4
    first: 5 tokens          prompt 5   +1         +1         +1
    second: 12 tokens        3 of 12    7 of 12    2 of 12    +1
    third: 4 tokens                                4          +1

A request's keys and values are a row of the cache, in pages of one pool. A prompt that begins like
the text of another row, also of a finished one, shares its full pages. When pages run out, rows of
finished requests are evicted, the least recently used first; then the last request is preempted: it
waits, and recomputes its text. A request gets the tokens that `generate_tokens` gives it alone.
"""

# ruff: noqa: T201 (an example prints)

import argparse
import operator
from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from fastattn import CacheView, OutOfPages, PagedKVCache, append_paged, attention_paged
from fastattn.generation import Sampling
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import load_model
from fastattn.training.tokenizers import CharacterTokenizer

# Steps by which a request of priority 1 may come later than one of 0 and go first: none starves.
HEAD_START = 16
BY_RANK = operator.attrgetter("rank")


@dataclass
class PackedLayer:
    """A layer's cache for one pass over packed tokens [total, 1], each a row to the model."""

    pages: CacheView  # of the rows
    slots: Tensor  # [total], where the tokens go
    positions: Tensor  # int32 [total], of each token in its text
    offsets: Tensor  # int32 [B + 1], of each row's first token
    longest: int  # the most tokens of a row
    tree: Tensor | None  # bool [total, longest], which of its row's each sees; None: all up to it

    uniform_length = None  # rows are of different lengths
    rotates = True  # `append` rotates queries and keys as it writes
    # For layers that `attention_paged` does not serve: relative positions, additive scores.
    k = property(lambda self: self._gathered(0))
    v = property(lambda self: self._gathered(1))

    def __post_init__(self) -> None:
        self.lengths = self.positions
        self.length_bound = self.max_length = self.pages.length_bound

    def append(self, k: Tensor, v: Tensor | None = None, *_: None, **rotation: Any) -> Any:
        """Write k and v [total, H_k, 1, D]; v None: latents, whose first columns are the values."""
        v = k[..., : self.pages.v.shape[-1]] if v is None else v
        if rotation:
            rotation |= {"q": rotation["q"][:, :, 0], "positions": self.positions}
        q = append_paged(self.pages, k[:, :, 0], v[:, :, 0], self.slots, **rotation)
        self.lengths = self.positions + 1
        return None if q is None else q[:, :, None]

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of q [total, H_q, 1, D], each token to its row up to itself."""
        how = {"max_seqlen_q": self.longest, "tree_mask": self.tree, **options}
        return attention_paged(q[:, :, 0], self.pages, self.offsets, **how)[:, :, None]

    def view(self) -> CacheView:
        return self.pages

    def _gathered(self, which: int) -> Tensor:
        of_row = torch.repeat_interleave(self.offsets.diff())
        return self.pages.gather()[which][of_row, :, : self.length_bound]


def packed_layers(
    cache: PagedKVCache, rows: Sequence[int], counts: Sequence[int],
    positions: Sequence[int] | None = None, tree: Tensor | None = None,
) -> list[PackedLayer]:  # fmt: skip
    """Each layer's cache for a pass over these rows' next tokens, `counts` of each."""
    lengths = [cache.length(row) for row in rows]
    slots = cache.extend(rows, counts)
    if positions is None:
        positions = [n + i for n, count in zip(lengths, counts, strict=True) for i in range(count)]
    places, offsets = (
        torch.tensor(numbers, dtype=torch.int32, device=slots.device)
        for numbers in (positions, [0, *accumulate(counts)])
    )
    views = [cache.view(rows, layer) for layer in range(cache.num_layers)]
    return [PackedLayer(view, slots, places, offsets, max(counts), tree) for view in views]


@dataclass(eq=False)
class Request:
    """A text to continue: `tokens` grows step by step, until it is `done`."""

    prompt: list[int]
    count: int  # of new tokens, at most
    sampling: Sampling
    generator: torch.Generator | None
    end_tokens: Collection[int]
    rank: tuple[int, int]  # the lowest goes first
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    row: int = -1  # of the cache; -1: it waits

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


class Engine:
    """Continuous batching of requests. Call `submit` and `end` between two steps.

    model: run in evaluation mode. cache: from `model.new_paged_cache`; its rows beyond max_batch,
    the most requests that run at a time, keep finished texts. max_step_tokens: most of a step.
    """

    def __init__(
        self, model: GPT, cache: PagedKVCache, *, max_batch: int = 8, max_step_tokens: int = 256
    ) -> None:
        self.model, self.cache = model.eval(), cache
        self.max_batch, self.max_step_tokens = max_batch, max_step_tokens
        if not 0 < max_batch <= len(cache.lengths):
            raise ValueError(f"max_batch must be 1 to {len(cache.lengths)} rows, got {max_batch}")
        if max_step_tokens < max_batch:
            raise ValueError(f"max_step_tokens must be at least {max_batch}, got {max_step_tokens}")
        self.running: list[Request] = []  # both by rank
        self.waiting: list[Request] = []
        self.kept: dict[int, list[int]] = {}  # texts by their rows, least recently used first
        self.plan: dict[Request, int] = {}  # tokens that the present step reads of each
        self.steps = self.arrivals = self.preemptions = self.shared_tokens = 0

    def submit(
        self, prompt: Sequence[int], count: int, *, sampling: Sampling | None = None,
        seed: int | None = None, end_tokens: Collection[int] = (), priority: int = 0,
    ) -> Request:  # fmt: skip
        """Queue a request; arguments as for `generate_tokens`. It must fit the model's context.

        priority: a unit goes before what came up to 16 steps earlier.
        """
        prompt, count = [operator.index(token) for token in prompt], operator.index(count)
        config = self.model.config
        if not prompt or not all(0 <= token < config.vocab_size for token in prompt):
            raise ValueError(f"prompt must hold tokens in 0..{config.vocab_size - 1}, got {prompt}")
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        # Nobody reads the last token.
        most = min(config.context_length, self.cache.k.shape[1] * self.cache.page_size) + 1
        if (total := len(prompt) + count) > most:
            raise ValueError(f"prompt and count must be {most} tokens at most, got {total}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rank = self.steps - HEAD_START * priority, self.arrivals
        request = Request(prompt, count, sampling or Sampling(), generator, end_tokens, rank)
        self.arrivals += 1
        insort(self.waiting, request, key=BY_RANK)
        return request

    def run(self) -> Iterator[tuple[Request, int]]:
        """Step until nothing is left to do; yield what the steps add."""
        while self.running or self.waiting:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Run the model once; return (request, token) for each new token."""
        self._make_plan()
        if not self.plan:
            return []
        self.steps += 1
        try:
            chosen = self._read()
        except BaseException:
            # Nobody knows what of their reserved slots is written.
            for request in list(self.plan):
                self._preempt(request)
            raise
        for request, token in chosen.items():
            if token not in request.end_tokens:
                request.tokens.append(token)
            if token in request.end_tokens or len(request.tokens) == request.count:
                self.end(request)
        return [(r, token) for r, token in chosen.items() if token not in r.end_tokens]

    def _read(self) -> dict[Request, int]:
        """Read the planned tokens; the next token of each request that is read to its end."""
        tokens = [token for r, count in self.plan.items() for token in self._unread(r)[:count]]
        rows, counts = [request.row for request in self.plan], list(self.plan.values())
        device = self.cache.k.device
        packed = torch.tensor(tokens, device=device)[:, None]
        last = torch.tensor([end - 1 for end in accumulate(counts)], device=device)
        layers = packed_layers(self.cache, rows, counts)
        logits = self.model(packed, cache=layers, rows=last)[0][:, -1]
        if not logits.isfinite().all():
            raise FloatingPointError("the model's scores are not finite")
        chosen = {}
        for request, scores in zip(self.plan, logits.split(1), strict=True):
            if not self._unread(request):
                seen = torch.zeros_like(scores, dtype=torch.bool)  # for a repetition penalty
                seen[0, request.text] = True
                chosen[request] = int(request.sampling.choose(scores, request.generator, seen))
        return chosen

    def _make_plan(self) -> None:
        """Choose what the step reads, of running requests first, and reserve pages for it."""
        self.plan = {}
        # First those with one token to read: nobody who writes waits for another's prompt.
        for request in sorted(self.running, key=lambda r: (len(self._unread(r)) > 1, r.rank)):
            # Alone it has room, as `submit` has checked.
            while request.row >= 0 and not self._reserve(request.row, self._next(request)):
                self._preempt(self.running[-1])
            if request.row >= 0:
                self.plan[request] = self._next(request)
        for request in list(self.waiting):
            if len(self.running) == self.max_batch or not self._admit(request):
                break
        self.plan = {request: count for request, count in self.plan.items() if count}

    def _unread(self, request: Request) -> list[int]:
        return request.text[self.cache.length(request.row) :]

    def _next(self, request: Request) -> int:
        """Count the tokens of a request that this step can still read."""
        return min(len(self._unread(request)), self.max_step_tokens - sum(self.plan.values()))

    def _reserve(self, row: int, count: int, spare: int = 0) -> bool:
        """Reserve pages for a row's next tokens, evicting finished texts; False: not enough."""
        while True:
            try:
                self.cache.reserve([row], count)
                enough = self.cache.free_pages >= spare
            except OutOfPages:
                enough = False
            if enough or not self._forget():
                return enough

    def _admit(self, request: Request) -> bool:
        """Admit a waiting request if there are pages; False: it and later ones wait."""
        source, shared, soon = self._find_shared(request.text)
        if soon > shared:
            return True  # It waits until another has computed more of its text.
        request.row = self.cache.allocate() if source is None else self.cache.fork(source)
        self.cache.truncate(request.row, shared)  # to full pages: nothing is copied
        count = self._next(request)
        # A page for each running request, which would otherwise preempt this one at once.
        if not count or not self._reserve(request.row, count, spare=len(self.running)):
            self.cache.free(request.row)
            request.row = -1
            return False
        self.waiting.remove(request)
        insort(self.running, request, key=BY_RANK)
        self.plan[request] = count
        self.shared_tokens += shared
        return True

    def _find_shared(self, text: list[int]) -> tuple[int | None, int, int]:
        """The row with most full pages of a text's beginning, their tokens, and those to come.

        The last token of the text does not count: it is always read, for its scores.
        """
        source, shared, soon, size = None, 0, 0, self.cache.page_size
        for row, other in [*self.kept.items(), *((r.row, r.text) for r in self.running)]:
            pairs = zip(other, text[:-1], strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            computed = min(alike, self.cache.length(row)) // size * size
            soon = max(soon, alike // size * size)
            if computed > shared:
                source, shared = row, computed
        if source in self.kept:
            self.kept[source] = self.kept.pop(source)  # used now
        return source, shared, soon

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages, and queue it again."""
        self.plan.pop(request, None)
        self.running.remove(request)
        self.cache.free(request.row)
        request.row = -1
        insort(self.waiting, request, key=BY_RANK)
        self.preemptions += 1

    def end(self, request: Request) -> None:
        """End a request, finished or not; its full pages stay for prompts with the same prefix."""
        if request.done:
            return
        request.done = True
        if request.row < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        whole = self.cache.length(request.row) // self.cache.page_size * self.cache.page_size
        if whole <= self._find_shared(request.text)[1]:  # others have them too, or there are none
            self.cache.free(request.row)
            return
        self.cache.truncate(request.row, whole)
        self.kept[request.row] = request.text[:whole]
        if len(self.kept) > len(self.cache.lengths) - self.max_batch:
            self._forget()

    def _forget(self) -> bool:
        """Free the least recently used row of a finished request, if there is one."""
        for row in self.kept:
            del self.kept[row]
            self.cache.free(row)
            return True
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["def main(", "class Token", "import "])
    parser.add_argument("--checkpoint", help="a run of fastattn train; default: an untrained model")
    parser.add_argument("--count", type=int, default=60, help="tokens for each prompt")
    parser.add_argument("--pages", type=int, default=64, help="of 16 tokens")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if options.checkpoint:
        model, tokenizer = load_model(options.checkpoint, device=device)
    else:
        tokenizer = CharacterTokenizer("".join(options.prompts))
        model = GPT(GPTConfig(tokenizer.vocab_size, context_length=128)).to(device)
    engine = Engine(model, model.new_paged_cache(options.pages, page_size=16))

    requests = []
    for seed, prompt in enumerate(options.prompts):
        ids, how = tokenizer.encode(prompt), Sampling(temperature=0.8, top_p=0.9)
        requests.append(engine.submit(ids, options.count, sampling=how, seed=seed))
        engine.step()  # the next one comes a step later
    list(engine.run())
    for prompt, request in zip(options.prompts, requests, strict=True):
        print(f"{prompt!r} -> {tokenizer.decode(request.tokens)!r}")
    print(f"{engine.steps} steps, {engine.preemptions} preemptions")


if __name__ == "__main__":
    main()
