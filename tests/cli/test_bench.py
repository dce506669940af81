"""`fastattn bench` on a CPU."""

import pytest
import torch

from fastattn.cli.main import main
from fastattn.training import step_timing

SMALL = ("bench", "--device", "cpu", "--context", "8", "--embed-dim", "16", "--layers", "1")


def test_table_of_backends(capsys):
    assert main([*SMALL, "--steps", "1", "--backends", "torch"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["backend", "ms/step", "tokens/s", "TFLOP/s", "MFU", "MiB"]
    assert row.split()[0] == "torch"
    assert float(row.split()[1]) > 0


def test_a_backend_that_cannot_be_timed_does_not_stop_the_next(capsys, monkeypatch):
    real = step_timing.time_training_steps
    refusal: Exception = torch.OutOfMemoryError("too much")

    def limited(*args, backend, **kwargs):
        if backend == "triton":
            raise refusal
        return real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(step_timing, "time_training_steps", limited)
    assert main([*SMALL, "--steps", "1", "--backends", "triton", "torch"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert "out of memory" in rows[0] and rows[1].startswith("torch")
    refusal = ValueError('backend "triton" cannot serve this call: no GPU')
    assert main([*SMALL, "--backends", "triton"]) == 1
    assert str(refusal) in capsys.readouterr().out


@pytest.mark.parametrize("option", ["steps", "batch"])
def test_numbers_out_of_range_are_one_line(capsys, option):
    assert main([*SMALL, f"--{option}", "0"]) == 1
    error = capsys.readouterr().err
    assert "must be at least 1, got 0" in error
    assert error.count("\n") == 1
