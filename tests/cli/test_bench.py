"""`fastattn bench` on a CPU."""

import os

import torch

from fastattn import dispatch
from fastattn.cli.main import main
from fastattn.models.gpt import GPTConfig
from fastattn.training import step_timing

SMALL = ("bench", "--device", "cpu", "--context", "8", "--embed-dim", "16", "--layers", "1")


def test_a_backend_that_cannot_be_timed_does_not_stop_the_next(capsys, monkeypatch):
    real = step_timing.time_training_steps
    refusal: Exception = torch.OutOfMemoryError("too much")

    shown = []

    def limited(*args, backend, **kwargs):
        shown.append(capsys.readouterr().out)
        if backend == "triton":
            raise refusal
        return real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(step_timing, "time_training_steps", limited)
    assert main([*SMALL, "--steps", "1", "--backends", "triton", "torch"]) == 0
    shown.append(capsys.readouterr().out)
    assert len(shown) == 3 and all(shown), "each row is printed at once"
    head, *rows = "".join(shown).splitlines()
    assert head.split() == ["backend", "ms/step", "tokens/s", "TFLOP/s", "MFU", "MiB"]
    assert "out of memory" in rows[0] and rows[1].startswith("torch")
    assert float(rows[1].split()[1]) > 0
    refusal = ValueError('backend "triton" cannot serve this call: no GPU')
    assert main([*SMALL, "--backends", "triton"]) == 1
    assert str(refusal) in capsys.readouterr().out
    assert main([*SMALL, "--backends", "hopper"]) == 1
    assert 'backend "hopper" cannot serve this call: ' in capsys.readouterr().out


def test_numbers_out_of_range_are_one_line(capsys):
    for option in ("steps", "batch"):
        assert main([*SMALL, f"--{option}", "0"]) == 1
        error = capsys.readouterr().err
        assert "must be at least 1, got 0" in error and error.count("\n") == 1


def test_steps_are_timed_with_the_backend_given(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "auto")
    seen = set()
    choose = dispatch.choose

    def remember(*args, **kwargs):
        actual = choose(*args, **kwargs)
        seen.add(actual.backend)
        return actual

    monkeypatch.setattr(dispatch, "choose", remember)
    issued: list[int] = []
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 24.0])
    config = GPTConfig(vocab_size=11, context_length=8, num_layers=1, num_heads=2, embed_dim=16)
    timing = step_timing.time_training_steps(
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
    assert seen == {"torch"} and len(issued) == 3
    assert os.environ[dispatch.ENVIRONMENT] == "auto"
