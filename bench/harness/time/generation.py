"""Speed of generation with the key/value cache and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ...generation.generate import generate_tokens
from ...models.gpt import GPT
from ...models.sampling import Sampling

GREEDY = Sampling(greedy=True)


@torch.inference_mode()
def generate_without_cache(model: GPT, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Greedy decoding without a cache: each token runs the model on the whole text.

    Args:
        model: in evaluation mode, with a context that all of the text fits in.
        prompt: token ids, at least one.
        count: tokens to generate.
    """
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text], device=device), last_only=True)
        text.append(int(logits[0, -1].argmax()))
        yield text[-1]


def generate_with_cache(model: GPT, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Greedy decoding with the key/value cache."""
    return generate_tokens(model, prompt, count, sampling=GREEDY)


METHODS: dict[str, Callable[[GPT, Sequence[int], int], Iterator[int]]] = {
    "cache": generate_with_cache,
    "no-cache": generate_without_cache,
}


def seconds_by_length(
    method: str,
    model: GPT,
    prompt: Sequence[int],
    lengths: Sequence[int],
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Seconds until the n-th token, for each n of `lengths`: the fastest of several runs.

    Args:
        method: a key of METHODS.
        model, prompt: as for `generate_without_cache`.
        lengths: rising numbers of tokens.
        repeats: runs.
        clock: seconds.
    """
    best: dict[int, float] = {}
    for _ in range(repeats):
        begin = clock()
        for n, _token in enumerate(METHODS[method](model, prompt, lengths[-1]), start=1):
            if n in lengths:
                seconds = clock() - begin
                best[n] = min(seconds, best.get(n, seconds))
    return best


def growth(seconds: dict[int, float]) -> float:
    """The exponent of time over length, from the first length to the last.

    1 is linear, 2 quadratic.
    """
    (n, first), (m, last) = min(seconds.items()), max(seconds.items())
    return float(torch.tensor(last / first).log() / torch.tensor(m / n).log())
