"""A layer, and training steps of the reference GPT, with each attention backend."""

import pytest
import torch

from fastattn.bench.time.jobs import GPT2_SMALL, module_work
from fastattn.models.gpt import GPTConfig
from fastattn.training.step_timing import BACKENDS, as_dict, time_training_steps

CPU_GPT = GPTConfig(vocab_size=256, context_length=64, num_layers=2, embed_dim=64)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_module(run, backend):
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    run(module_work(backend, x), "cuda")


def test_module_cpu(run):
    run(module_work("torch", torch.randn(2, 128, 128), heads=(4, 2)), "cpu")


def train(benchmark, config, **options):
    """Steps whose clock is `time_training_steps`' own."""
    timings = []
    benchmark.pedantic(lambda: timings.append(time_training_steps(config, **options)), rounds=1)
    benchmark.extra_info.update(as_dict(timings[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_step(benchmark, quiet_peers, backend):
    train(benchmark, GPT2_SMALL, batch_size=16, backend=backend, device="cuda")


def test_training_step_cpu(benchmark):
    sizes = {"batch_size": 4, "steps": 5, "warm_up": 1, "dtype": torch.float32}
    train(benchmark, CPU_GPT, backend="torch", device="cpu", **sizes)
