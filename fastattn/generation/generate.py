"""Generate tokens or text from prompts, with KV caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..checks import Sizes, as_python, check_input, check_int, type_name
from ..models.gpt import GPT
from ..models.sampling import Sampling
from ..models.transfer import to_device
from .graph import GraphWindow
from .request import Request, Tally, choose_next, items, make_request
from .text import TextCodec, TextStream, encode_prompt
from .window import PastContext, Window

Setting = TypeVar("Setting")


class Batch:
    """Batched generation from prompts of any lengths, one new token per row and step.

    The prompts are read once, right-padded, then one token per step. Rows do not depend on each
    other. Finished rows stay idle until all are done.

    Args:
        model: run in evaluation mode.
        requests: one per row, from `make_request`.
        cuda_graph: replay the steps of one token a row as a CUDA graph; see `GraphWindow`.
        past_context: behaviour at a full context, "restart" or "crop"; see `Window`.

    Raises:
        ValueError: cuda_graph is True without a CUDA device; or past_context is unknown.
    """

    def __init__(
        self,
        model: GPT,
        requests: Sequence[Request],
        *,
        cuda_graph: bool = False,
        past_context: PastContext = "restart",
    ) -> None:
        self.requests = list(requests)
        self._fresh = [request.prompt for request in requests]
        longest = max(len(request.prompt) + request.count for request in requests)
        kind = GraphWindow if cuda_graph else Window
        self._window = kind(model, len(self.requests), longest, past_context)

    @property
    def running(self) -> bool:
        """Whether any row is unfinished."""
        return any(not request.done for request in self.requests)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Choose the next token of every unfinished row.

        Returns:
            (row, token) of every added token, without end tokens.

        Raises:
            FloatingPointError: the model's scores are not finite.
        """
        rows = [row for row, request in enumerate(self.requests) if not request.done]
        pieces = [
            [] if r.done else fresh for r, fresh in zip(self.requests, self._fresh, strict=True)
        ]
        logits = self._window.read(pieces, check=False)
        if len(rows) < len(self.requests):
            logits = logits.index_select(0, to_device(rows, logits.device))
        requests = [self.requests[row] for row in rows]
        added = []
        for row, token in zip(rows, choose_next(logits, requests), strict=True):
            if self.requests[row].add(token):
                added.append((row, token))
            self._fresh[row] = [token]
        return added


def generate_tokens(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
    end_token: int | Collection[int] | None = None,
    cuda_graph: bool = False,
    past_context: PastContext = "restart",
) -> Iterator[int]:
    """Continue a prompt, yielding each new token as soon as it is chosen.

    Args:
        model: run in evaluation mode.
        prompt: token ids, at least one, in a sequence or an integer tensor or array with one dim;
            of more than context_length the last ones are read.
            Generation continues past the context: see past_context.
        count: the most tokens to generate.
        sampling: sampling settings; default: the model's own distribution.
        seed: seed of the sampling, the same on every device; None = torch's generator.
        end_token: one or several tokens that end the text and are not yielded.
        cuda_graph, past_context: as for `Batch`.

    Yields:
        token ids.

    Raises:
        ValueError: the prompt is empty, a token is unknown to the model, or count is negative.
        FloatingPointError: the model's scores are not finite.
    """
    request = make_request(model, prompt, count, sampling=sampling, seed=seed, end_token=end_token)
    batch = Batch(model, [request], cuda_graph=cuda_graph, past_context=past_context)
    while batch.running:
        for _, token in batch.step():
            yield token


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    counts: int | Sequence[int],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | None = None,
    end_token: int | Collection[int] | None = None,
    cuda_graph: bool = False,
    past_context: PastContext = "restart",
) -> list[list[int]]:
    """Continue prompts of any lengths together.

    Row b equals `generate_tokens` with seed + b. A tensor or array [B, T] is B prompts without
    padding; for one with padding see `unpad`.

    Args:
        counts: the most tokens to generate, for all rows or for each.
        sampling: for all rows or for each.
        model, prompts, seed, end_token, cuda_graph, past_context: as for `generate_tokens`.

    Returns:
        Each row's new tokens.

    Raises:
        ValueError: there is no prompt, counts or sampling are not as many as there are prompts, or
            as `generate_tokens`.
        FloatingPointError: the model's scores are not finite.
    """
    requests = _make_requests(model, prompts, counts, sampling, seed, end_token)
    batch = Batch(model, requests, cuda_graph=cuda_graph, past_context=past_context)
    while batch.running:
        batch.step()
    return [request.tokens for request in requests]


def generate_text(
    model: GPT,
    tokenizer: TextCodec,
    prompt: str,
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    end_token: int | Collection[int] | None = None,
    cuda_graph: bool = False,
    past_context: PastContext = "restart",
    tally: Tally | None = None,
) -> Iterator[str]:
    """Continue a text, yielding pieces of complete characters.

    Args:
        tokenizer: of the model.
        prompt: text to continue; an empty one starts after a line break, or after token 0 if the
            tokenizer has no line break.
        stop: strings that end the text, not yielded.
        tally: counts the tokens.
        model, count, sampling, seed, end_token, cuda_graph, past_context: as for
            `generate_tokens`.

    Yields:
        text without the prompt. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: the tokenizer does not know a character of the prompt, a stop string is empty,
            or as `generate_tokens`.
        FloatingPointError: the model's scores are not finite.
    """
    pieces = generate_texts(
        model,
        tokenizer,
        [prompt],
        count,
        sampling=sampling,
        seed=seed,
        stop=stop,
        tally=tally,
        end_token=end_token,
        cuda_graph=cuda_graph,
        past_context=past_context,
    )
    for _, piece in pieces:
        yield piece


def generate_texts(
    model: GPT,
    tokenizer: TextCodec,
    prompts: Sequence[str],
    counts: int | Sequence[int],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    end_token: int | Collection[int] | None = None,
    cuda_graph: bool = False,
    past_context: PastContext = "restart",
    tally: Tally | None = None,
) -> Iterator[tuple[int, str]]:
    """Continue texts together, yielding (row, piece) with pieces of complete characters.

    Args and errors: as `generate_text`, and `counts` and `sampling` as for `generate_batch`.
    """
    prompts = items("prompts", "str", prompts)
    tokens = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    requests = _make_requests(model, tokens, counts, sampling, seed, end_token)
    streams = [TextStream(tokenizer, stop, prompt) for prompt in prompts]
    tally = Tally() if tally is None else tally
    batch = Batch(model, requests, cuda_graph=cuda_graph, past_context=past_context)
    while batch.running:
        added = batch.step()
        tally.tokens += len(added)
        for row, token in added:
            if piece := streams[row].feed(token):
                yield row, piece
            requests[row].done |= streams[row].stopped
    for row, stream in enumerate(streams):
        if rest := stream.finish():
            yield row, rest


def unpad(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """Remove the padding, on either side, from the rows of a batch.

    Args:
        tokens: [B, T] integers.
        mask: bool [B, T], True = a token, False = padding.

    Returns:
        B prompts for `generate_batch`.

    Raises:
        TypeError: mask is not bool.
        ValueError: tokens is not 2-d, or mask has another shape.
    """
    sizes: Sizes = {}
    check_input("tokens", tokens, "", "B T", tokens, sizes)
    check_input("mask", mask, "bool", "B T", tokens, sizes)
    return [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]


def _make_requests(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    counts: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None,
    seed: int | None,
    end_token: int | Collection[int] | None,
) -> list[Request]:
    if getattr(prompts, "ndim", 0) == 2:
        prompts = prompts.tolist()  # type: ignore[attr-defined]
    prompts = items("prompts", "prompts", prompts)
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    n = len(prompts)
    first = None if seed is None else check_int("seed", seed)
    seeds = [None] * n if first is None else range(first, first + n)
    each_count = _for_each("counts", as_python(counts), int, n)
    sampling = Sampling() if sampling is None else sampling
    settings = _for_each("sampling", sampling, Sampling, n)
    return [
        make_request(model, prompt, count, sampling=setting, seed=own, end_token=end_token)
        for prompt, count, setting, own in zip(prompts, each_count, settings, seeds, strict=True)
    ]


def _for_each(
    name: str, value: Setting | Sequence[Setting], kind: type[Setting], count: int
) -> Sequence[Setting]:
    """Make a list with a value per prompt, from one value or a sequence."""
    if isinstance(value, kind):
        return [value] * count
    each = items(name, kind.__name__, value)
    if len(each) != count:
        raise ValueError(f"{name} must be one for all {count} prompts or {count}, got {len(each)}")
    for setting in each:
        if not isinstance(as_python(setting), kind):
            raise TypeError(f"{name} must hold {kind.__name__}, got {type_name(setting)}")
    return each
