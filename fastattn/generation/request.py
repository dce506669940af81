"""Generation request: prompt, settings, and the tokens generated so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import check_int, check_is, type_name
from ..models.gpt import GPT, GPTConfig
from ..models.sampling import Sampling, choose_rows, make_generator


@dataclass(eq=False)
class Request:
    """A generation in progress; see `make_request`.

    Attributes:
        prompt: token ids, at least one.
        count: the most tokens to add.
        sampling: how to choose them.
        generator: of the sampling; None = torch's own.
        end_tokens: each ends the text and is not part of it.
        tokens: the generated tokens.
        done: whether generation has ended.
        seen: bool [V], tokens in the text, if the sampling depends on it.
    """

    prompt: list[int]
    count: int
    sampling: Sampling
    generator: torch.Generator | None
    end_tokens: frozenset[int]
    seen: Tensor | None
    tokens: list[int] = field(default_factory=list)
    done: bool = False

    def add(self, token: int) -> bool:
        """Add a token, unless it is an end token; return whether it was added."""
        if token in self.end_tokens:
            self.done = True
            return False
        self.tokens.append(token)
        if self.seen is not None:
            self.seen[token] = True
        self.done |= len(self.tokens) == self.count
        return True


@dataclass(eq=False)
class Tally:
    """Progress of a generation.

    tokens: number of tokens chosen so far, in all rows together.
    """

    tokens: int = 0


def make_request(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    *,
    sampling: Sampling | None = None,
    seed: int | None = None,
    end_token: int | Collection[int] | None = None,
) -> Request:
    """Check a prompt and its settings; arguments as for `generate_tokens`.

    Raises:
        TypeError: the model is no GPT, or the prompt, count or an end token has a wrong type.
        ValueError: the prompt is empty or has several dims, a token is not in the model's
            vocabulary, or count is negative.
    """
    check_is("model.config", getattr(model, "config", None), GPTConfig)
    vocab_size = model.config.vocab_size
    prompt = items("prompt", "token ids", prompt)
    prompt = [check_int("a token of prompt", token) for token in prompt]
    if not prompt:
        raise ValueError("prompt must hold at least one token, got none")
    count = check_int("count", count)
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    several: Any = end_token
    several = several.tolist() if hasattr(several, "tolist") else several
    if not isinstance(several, Collection):
        several = [] if several is None else [several]
    ends = [check_int("end_token", token) for token in several]
    for name, tokens in (("prompt", prompt), ("end_token", ends)):
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{name} must hold tokens in 0..{vocab_size - 1}, got {wrong[0]}")
    sampling = Sampling() if sampling is None else sampling
    check_is("sampling", sampling, Sampling)
    seen = None
    if sampling.needs_seen:
        device = next(model.parameters()).device
        seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        seen[prompt] = True
    generator, done = make_generator(seed), count == 0
    return Request(prompt, count, sampling, generator, frozenset(ends), seen, done=done)


def items(name: str, what: str, values: Any) -> list[Any]:
    """Make a list of a sequence or of a 1-d tensor or array; what: the name of its items.

    Raises:
        TypeError: values is text or no sequence.
        ValueError: it has several dims, or none.
    """
    if hasattr(values, "tolist") and hasattr(values, "shape"):
        if len(values.shape) != 1:
            raise ValueError(f"{name} must have one dim, got shape {list(values.shape)}")
        held: list[Any] = values.tolist()
        return held
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of {what}, got {type_name(values)}")
    return list(values)


def choose_next(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose the next token of each request from its row of logits [B, V], without adding it."""
    return choose_rows(
        logits,
        [request.sampling for request in requests],
        [request.generator for request in requests],
        [request.seen for request in requests],
    )
