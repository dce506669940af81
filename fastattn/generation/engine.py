"""Generation with a key/value cache, one token or one piece of text at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ..models.gpt import GPT
from .sampling import Sampling


class TextDecoder(Protocol):
    """Turns ids into text one at a time."""

    def feed(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """What text generation needs of a tokenizer."""

    def encode(self, text: str, /) -> list[int]: ...

    def decoder(self) -> TextDecoder: ...


@torch.inference_mode()
def generate_tokens(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Continues a prompt, yielding each new token as soon as it is chosen.

    The prompt goes through the model once, every further token alone. When context_length tokens
    are in the cache, the last half of them is read in anew and becomes the start of the window:
    the text goes on without end, while the model sees between half and all of its context.

    Args:
        model: in evaluation mode.
        prompt: token ids, at least one; of a longer prompt the last context_length are read.
        count: tokens to generate.
        sampling: how to choose; default: from the model's own distribution.
        seed: of the choices; None = torch's own generator.

    Yields:
        token ids.

    Raises:
        ValueError: prompt is empty, or count is negative.
        FloatingPointError: the model's scores are not finite.
    """
    if not prompt:
        raise ValueError("prompt must hold at least one token, got none")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    sampling = Sampling() if sampling is None else sampling
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    context = model.config.context_length
    recent = deque(prompt, maxlen=context)
    cache = model.new_cache(1, context)
    fresh = list(recent)
    for _ in range(count):
        tokens = torch.tensor([fresh], device=device)
        logits = model(tokens, cache=cache, last_only=True)[:, -1]
        if not logits.isfinite().all():
            raise FloatingPointError("the model's scores are not finite: its training has diverged")
        token = int(sampling.choose(logits, generator))
        yield token
        recent.append(token)
        fresh = [token]
        if cache[0].uniform_length == context:
            for layer_cache in cache:
                layer_cache.reset()
            fresh = list(recent)[-max(1, context // 2) :]


def generate_text(
    model: GPT,
    tokenizer: TextCodec,
    prompt: str,
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """Continues a text, yielding pieces of whole characters as they are completed.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        prompt: text to continue; an empty one starts as behind a line break, or behind token 0
            where the tokenizer knows no line break.
        count: tokens to generate.
        sampling: how to choose; default: from the model's own distribution.
        seed: of the choices; None = torch's own generator.

    Yields:
        text without the prompt. Bytes that are no UTF-8 come out as U+FFFD.

    Raises:
        ValueError: the tokenizer does not know a character of the prompt, or as `generate_tokens`.
    """
    tokens = tokenizer.encode(prompt) or _line_start(tokenizer)
    decoder = tokenizer.decoder()
    for token in generate_tokens(model, tokens, count, sampling=sampling, seed=seed):
        if piece := decoder.feed(token):
            yield piece
    if rest := decoder.finish():
        yield rest


def _line_start(tokenizer: TextCodec) -> list[int]:
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return [0]
