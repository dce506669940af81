"""Tokens/s of generation with the key/value cache and without, on one thread of the CPU.

`growth` in the extra info is the exponent of time over length: 1 is linear, 2 quadratic. Without
the cache it reaches 2 only on long texts, where the fixed cost of a step is small.
"""

import pytest
import torch

from fastattn.bench.time.generation import METHODS, growth, seconds_by_length
from fastattn.models.gpt import GPT, GPTConfig

LENGTHS = (32, 64, 128, 256)


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
    timings = []

    def generate():
        timings.append(seconds_by_length(method, model, [1], LENGTHS, repeats=1))

    benchmark.pedantic(generate, rounds=3)
    seconds = {n: min(timing[n] for timing in timings) for n in LENGTHS}
    benchmark.extra_info["tokens_per_second"] = {n: round(n / s, 1) for n, s in seconds.items()}
    benchmark.extra_info["growth"] = round(growth(seconds), 2)
