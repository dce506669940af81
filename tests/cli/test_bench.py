"""`fastattn bench` on a CPU."""

import pytest
import torch

from fastattn.bench import training_step
from fastattn.cli import main

SMALL = ("bench", "--device", "cpu", "--context", "8", "--embed-dim", "16", "--layers", "1")


def test_table_of_backends(capsys):
    assert main.main([*SMALL, "--steps", "1", "--backends", "torch"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["backend", "ms/step", "tokens/s", "TFLOP/s", "MFU", "MiB"]
    assert row.split()[0] == "torch"
    assert float(row.split()[1]) > 0


def test_a_backend_that_cannot_serve_is_listed_with_its_reason(capsys, monkeypatch):
    def refuse(*args, backend, **kwargs):
        raise ValueError(f'backend "{backend}" cannot serve this call: no GPU')

    monkeypatch.setattr(training_step, "time_training_steps", refuse)
    assert main.main([*SMALL, "--backends", "triton"]) == 1
    assert 'backend "triton" cannot serve this call: no GPU' in capsys.readouterr().out


def test_a_backend_that_runs_out_of_memory_does_not_stop_the_next(capsys, monkeypatch):
    real = training_step.time_training_steps

    def limited(*args, backend, **kwargs):
        if backend == "triton":
            raise torch.OutOfMemoryError("too much")
        return real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(training_step, "time_training_steps", limited)
    assert main.main([*SMALL, "--steps", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert "out of memory" in rows[0]
    assert rows[1].startswith("torch")


@pytest.mark.parametrize("option", ["steps", "batch"])
def test_numbers_out_of_range_are_one_line(capsys, option):
    assert main.main([*SMALL, f"--{option}", "0"]) == 1
    error = capsys.readouterr().err
    assert "must be at least 1, got 0" in error
    assert error.count("\n") == 1


def test_steps_are_timed_with_the_backend_that_was_asked_for(monkeypatch):
    import os

    from fastattn import dispatch
    from fastattn.models.gpt import GPTConfig

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
    timing = training_step.time_training_steps(
        config, batch_size=3, backend="torch", device="cpu", dtype=torch.float32,
        steps=2, warm_up=1, clock=lambda: next(times), issued=lambda: issued.append(1),
    )  # fmt: skip
    # The step of 9 s warms up; the others take 2 s and 4 s for 24 tokens.
    assert (timing.step_ms, timing.tokens_per_second) == (3000.0, 8.0)
    assert (timing.mfu, timing.peak_mib) == (None, None)
    assert seen == {"torch"}
    assert len(issued) == 3
    assert os.environ[dispatch.ENVIRONMENT] == "auto"
