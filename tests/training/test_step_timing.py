"""Training steps: how they are timed."""

import os

import torch

from fastattn import dispatch
from fastattn.models.gpt import GPTConfig
from fastattn.training.step_timing import time_training_steps


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
