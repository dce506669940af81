"""Tokens/s of generation with the key/value cache and without, on one thread of the CPU.

`growth` in the extra info is the exponent of time over length: 1 is linear, 2 quadratic. Without
the cache it reaches 2 only on long texts, where the fixed cost of a step is small.
"""

import math
import time
from functools import partial

import pytest
import torch

from fastattn.generation.generate import generate_tokens
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.sampling import Sampling

LENGTHS = (32, 64, 128, 256)


@torch.inference_mode()
def without_cache(model, prompt, count):
    """Greedy decoding in which each token runs the model on the whole text."""
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text]), last_only=True)
        text.append(int(logits[0, -1].argmax()))
        yield text[-1]


METHODS = {
    "cache": partial(generate_tokens, sampling=Sampling(greedy=True)),
    "no-cache": without_cache,
}


@pytest.fixture(scope="module")
def model():
    """On one thread: a step of one token is too small to share."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=256, context_length=1024, num_layers=2, num_heads=4, embed_dim=128
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield GPT(config).eval()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", METHODS)
def test_generate_cpu(benchmark, model, method):
    best = dict.fromkeys(LENGTHS, math.inf)

    def generate():
        begin = time.perf_counter()
        for n, _ in enumerate(METHODS[method](model, [1], LENGTHS[-1]), start=1):
            if n in best:
                best[n] = min(best[n], time.perf_counter() - begin)

    benchmark.pedantic(generate, rounds=3)
    (n, first), *_, (m, last) = best.items()
    benchmark.extra_info["tokens_per_second"] = {n: round(n / s, 1) for n, s in best.items()}
    benchmark.extra_info["growth"] = round(math.log(last / first) / math.log(m / n), 2)
