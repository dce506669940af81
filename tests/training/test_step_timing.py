"""Training steps: how they are timed, and how many operations they count."""

import os

import pytest
import torch

from fastattn import dispatch
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.step_timing import dense_bf16_tflops, flops_per_token, time_training_steps


def test_steps_are_timed_with_the_backend_given(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "auto")
    seen = set()
    choose = dispatch.choose

    def remember(*args, **kwargs):
        found = choose(*args, **kwargs)
        seen.add(found.backend)
        return found

    monkeypatch.setattr(dispatch, "choose", remember)
    issued: list[int] = []
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 24.0])
    config = GPTConfig(vocab_size=11, context_length=8, num_layers=1, num_heads=2, embed_dim=16)
    timing = time_training_steps(
        config,
        batch_size=3,
        backend="torch",
        device="cpu",
        dtype=torch.float32,
        steps=2,
        warm_up=1,
        clock=lambda: next(times),
        issued=lambda: issued.append(1),
    )
    # The step of 9 s warms up; the others take 2 s and 4 s for 24 tokens.
    assert (timing.step_ms, timing.tokens_per_second) == (3000.0, 8.0)
    assert (timing.mfu, timing.peak_mib) == (None, None)
    assert seen == {"torch"}
    assert len(issued) == 3
    assert os.environ[dispatch.ENVIRONMENT] == "auto"


def test_operations_of_a_training_token():
    config = GPTConfig(vocab_size=100, context_length=8, num_layers=3, num_heads=2, embed_dim=16)
    parameters = GPT(config).num_parameters()
    positions = 8 * 16
    # Causal rows of 8 tokens see 4 keys on average by convention: 3 layers, 3 * 4 * 16 each.
    expected = 6 * (parameters - positions) + 3 * (3 * 4 * 16) * 4
    assert flops_per_token(config, parameters) == expected


def test_operations_of_a_training_token_with_a_window_and_an_untied_head():
    config = GPTConfig(
        vocab_size=100,
        context_length=8,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        positions="rotary",
        window=3,
        tie_weights=False,
    )
    parameters = GPT(config).num_parameters()
    # Rows see 1, 2, 3, 3, 3, 3, 3, 3 keys: 21 / 8 on average. The embedding multiplies nothing.
    expected = 6 * (parameters - 100 * 16) + 3 * 4 * 16 * 21 / 8
    assert flops_per_token(config, parameters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0)],
)
def test_dense_rate_of_the_data_sheet(name, rate):
    assert dense_bf16_tflops(name) == rate
    assert dense_bf16_tflops("Imaginary GPU") is None
