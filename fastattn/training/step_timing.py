"""Timing of training steps of the reference GPT with one attention backend."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ..dispatch import ENVIRONMENT, choose
from ..models.gpt import GPT, GPTConfig
from ..options import Options
from .train_config import TrainConfig
from .trainer import make_optimizer
from .usage import check_memory, flops_per_token, full_rate, peak_mib

BACKENDS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class StepTiming:
    """Speed and memory of training with one backend.

    step_ms: median of an optimizer step, forward and backward included. model_tflops: by
    `flops_per_token`. mfu: share of the data sheet's dense bf16 rate; None on unknown devices and
    in other dtypes. peak_mib: most memory that torch held at once; None on a CPU.
    """

    backend: str
    step_ms: float
    tokens_per_second: float
    model_tflops: float
    mfu: float | None
    peak_mib: float | None


def time_training_steps(
    config: GPTConfig,
    *,
    batch_size: int,
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 10,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    issued: Callable[[], object] = lambda: None,
) -> StepTiming:
    """Train a new model on random tokens for some steps.

    Args:
        config: of the model; sequences have its context_length.
        batch_size: sequences per step.
        backend: "auto", "triton", "hopper" or "torch".
        device, dtype: where to run, and autocast's dtype; weights are float32.
        steps: timed steps, at least 1.
        warm_up: steps before them.
        clock: seconds.
        issued: called when a step is compiled and issued, before synchronisation.

    Raises:
        ValueError: steps or batch_size is not positive, or the backend cannot serve; the message
            gives the reason.
        torch.OutOfMemoryError: the step does not fit the device.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    with mock.patch.dict(os.environ, {ENVIRONMENT: backend}):
        q = torch.zeros(1, 1, 1, config.head_dim, device=device, dtype=dtype)
        choose(q, q, q, Options(causal=True), backend)
        step, parameters = _make_step(config, batch_size, device, dtype)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for i in range(warm_up + steps):
            begin = clock()
            step()
            issued()
            if on_gpu:
                torch.cuda.synchronize(device)
            elapsed = clock() - begin
            if i >= warm_up:
                seconds.append(elapsed)
    median = statistics.median(seconds)
    tokens = batch_size * config.context_length
    tflops = flops_per_token(config, parameters) * tokens / median / 1e12
    rate = full_rate(device, dtype)
    return StepTiming(
        backend=backend,
        step_ms=1e3 * median,
        tokens_per_second=tokens / median,
        model_tflops=tflops,
        mfu=None if rate is None else 1e12 * tflops / rate,
        peak_mib=peak_mib(device) if on_gpu else None,
    )


def _make_step(
    config: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], int]:
    """Make a function that runs one training step; return it and the number of parameters."""
    tokens = batch_size * config.context_length
    check_memory(GPT, config, device, tokens=tokens, ranks=1)
    torch.manual_seed(0)
    model = GPT(config).to(device).train()
    optimizer = make_optimizer(model, TrainConfig(learning_rate=1e-4))
    shape = (batch_size, config.context_length + 1)
    rows = torch.randint(config.vocab_size, shape, device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model.num_parameters()


def as_dict(timing: StepTiming) -> dict[str, Any]:
    """Return the figures as JSON values, without the backend."""
    fields = {
        "step_ms": round(timing.step_ms, 3),
        "tokens_per_second": round(timing.tokens_per_second),
        "model_tflops": float(f"{timing.model_tflops:.4g}"),
    }
    if timing.mfu is not None:
        fields["mfu"] = round(timing.mfu, 4)
    if timing.peak_mib is not None:
        fields["peak_mib"] = round(timing.peak_mib)
    return fields
