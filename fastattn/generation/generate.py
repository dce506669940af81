"""Continuing prompts with a key/value cache, one token or one piece of text at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..models.gpt import GPT
from ..models.sampling import Sampling
from ..models.transfer import to_device
from .graph import make_window
from .request import Request, Tally, choose_next, make_request
from .text import TextCodec, TextStream, encode_prompt
from .window import PastContext

Setting = TypeVar("Setting")


class Batch:
    """Prompts of any lengths that are continued together, one new token a row and step.

    The prompts go through the model once, right-padded, and every further token alone; each row has
    its own place in the cache, so no row depends on which others are there. A row that is done
    stays idle until all are; `Engine` gives its place to another instead. At the end of the
    model's context it behaves as `Reading`.

    Args:
        model: in evaluation mode.
        requests: a row each, from `make_request`.
        cuda_graph: replay the steps of one token a row as a CUDA graph; see `GraphWindow`.
        past_context: what follows a full context, "restart" or "crop"; see `Reading`.

    Raises:
        ValueError: cuda_graph is True, and the model is on no CUDA device; or past_context is
            unknown.
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
        self._fresh = [[] if request.done else request.prompt for request in requests]
        longest = max(len(request.prompt) + request.count for request in requests)
        self._window = make_window(model, len(self.requests), longest, cuda_graph, past_context)

    @property
    def running(self) -> bool:
        """Whether any row goes on."""
        return any(not request.done for request in self.requests)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Chooses the next token of every row that goes on.

        Returns:
            (row, token) of every token added; none for a row that its end token has ended.

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
        self._fresh = [
            [] if request.done else fresh
            for request, fresh in zip(self.requests, self._fresh, strict=True)
        ]
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
    """Continues a prompt, yielding each new token as soon as it is chosen.

    Args:
        model: in evaluation mode.
        prompt: token ids, at least one; of one longer than the context the last context_length
            are read, and generation goes on past it: see past_context.
        count: the most tokens to generate.
        sampling: how to choose; default: from the model's own distribution.
        seed: of the choices, the same on every device; None = torch's own generator.
        end_token: ends the text and is not yielded; several tokens: each of them does.
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
    """Continues prompts of any lengths together.

    Row b is what `generate_tokens` gives for it alone with seed + b. For prompts in a padded tensor
    see `unpad`.

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
    """Continues a text, yielding pieces of whole characters as they are completed.

    Args:
        tokenizer: of the model.
        prompt: text to continue; an empty one starts as behind a line break, or behind token 0
            where the tokenizer knows no line break.
        stop: strings that end the text; neither they nor what follows them is yielded.
        tally: counts the tokens.
        model, count, sampling, seed, end_token, cuda_graph, past_context: as for
            `generate_tokens`.

    Yields:
        text without the prompt. Bytes that are no UTF-8 come out as U+FFFD.

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
        end_token=end_token,
        cuda_graph=cuda_graph,
        past_context=past_context,
        tally=tally,
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
    """Continues texts together, yielding (row, piece) as pieces of whole characters are completed.

    Args and errors: as `generate_text`, and `counts` and `sampling` as for `generate_batch`.
    """
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
    """The rows of a padded batch, on whichever side it is padded.

    Args:
        tokens: [B, T] integers.
        mask: bool [B, T], True = a token, False = padding.

    Returns:
        B prompts for `generate_batch`.

    Raises:
        TypeError: mask is not bool.
        ValueError: tokens is not 2-d, or mask has another shape.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape [B, T], got {tuple(tokens.shape)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    if mask.shape != tokens.shape:
        raise ValueError(
            f"mask must have tokens' shape {tuple(tokens.shape)}, got {tuple(mask.shape)}"
        )
    return [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]


def _make_requests(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    counts: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None,
    seed: int | None,
    end_token: int | Collection[int] | None,
) -> list[Request]:
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    if sampling is None:
        sampling = Sampling()
    each_count = _for_each("counts", counts, int, len(prompts))
    each_sampling = _for_each("sampling", sampling, Sampling, len(prompts))
    return [
        make_request(
            model,
            prompt,
            count,
            sampling=setting,
            seed=None if seed is None else seed + row,
            end_token=end_token,
        )
        for row, (prompt, count, setting) in enumerate(
            zip(prompts, each_count, each_sampling, strict=True)
        )
    ]


def _for_each(
    name: str, value: Setting | Sequence[Setting], kind: type[Setting], count: int
) -> Sequence[Setting]:
    """One value a prompt, of one for all or of as many as there are prompts."""
    if isinstance(value, kind):
        return [value] * count
    assert isinstance(value, Sequence)
    if len(value) != count:
        raise ValueError(f"{name} must be one for all {count} prompts or {count}, got {len(value)}")
    return value
