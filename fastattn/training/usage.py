"""Operations per token, MFU and memory of training."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.gpt import GPTConfig
from ..models.stack import on_meta

# Dense bf16 matrix rate in TFLOP/s by torch's device name. Sources: NVIDIA's data sheets of A100,
# L40S, H100, H200 and B200, without sparsity; AMD's of MI300X.
_DENSE_BF16 = {
    "A100": 312.0,
    "L40S": 362.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "B200": 2250.0,
    "MI300X": 1307.4,
}


def flops_per_token(config: GPTConfig, parameters: int) -> float:
    """Count the operations of training per token, without recomputation.

    Six per weight of a matrix product (Kaplan et al. 2020, section 2.1), the tied embedding counted
    once, as the output layer. Plus attention, three times the 4 * C * T of a forward pass in each
    layer, halved as the mask is causal.
    """
    C, T = config.embed_dim, config.context_length
    if config.positions == "learned":
        parameters -= T * C
    if not config.tie_weights:
        parameters -= config.vocab_size * C
    keys = min(T, config.window or T)
    pairs = keys - keys * (keys - 1) / (2 * T) if config.window else T / 2
    return 6.0 * parameters + 12.0 * config.num_layers * C * pairs


def dense_bf16_tflops(name: str) -> float | None:
    """Get a GPU's dense bf16 rate from its data sheet; None for unknown GPUs."""
    return next((rate for gpu, rate in _DENSE_BF16.items() if gpu in name), None)


def full_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Get the peak rate for MFU, in operations per second; None if unknown.

    dtype: of matrix products; the table has 16-bit rates only.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return None
    tflops = dense_bf16_tflops(torch.cuda.get_device_name(device))
    return None if tflops is None else 1e12 * tflops


def peak_mib(device: torch.device) -> float | None:
    """Get the peak memory in MiB: torch's on a GPU, or this process's on a CPU.

    None on Windows, which does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ModuleNotFoundError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss, by getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def check_memory(
    build: Callable[[Any], nn.Module], config: Any, device: torch.device, *, tokens: int, ranks: int
) -> None:
    """Raise, before it is built, if a model cannot be trained in a device's memory.

    Counts weights, gradients and AdamW's moments, 16 bytes per parameter, split over the ranks (4
    while each builds the model), and one vector of each of a batch's tokens.

    Raises:
        ValueError: they need more than there is.
    """

    names = ("num_layers", "num_decoder_layers")
    depths = {name: n for name in names if (n := getattr(config, name, None))}

    def count(**layers: int) -> int:
        placed = dataclasses.replace(config, **{**dict.fromkeys(depths, 1), **layers})
        model = on_meta(lambda: build(placed))
        return sum(x.numel() for x in model.parameters())

    shown = ", ".join(
        f"{name}={n}" for name, n in {**depths, "embed_dim": config.embed_dim}.items()
    )
    try:
        one = count()
        parameters = one + sum((count(**{name: 2}) - one) * (n - 1) for name, n in depths.items())
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"a model of {shown} is impossibly large: {error}") from None
    batch = 4 * tokens * config.embed_dim // ranks
    own = max(4, 16 // ranks) * parameters + batch
    for where, need in ((device, own), (torch.device("cpu"), 4 * parameters)):
        if (held := _memory(where)) is not None and need > held:
            raise ValueError(
                f"a model of {shown} has at least {parameters:,} parameters, and training it on "
                f"batches of {tokens:,} tokens needs {need / 2**30:,.1f} GiB on {where}, which has "
                f"{held / 2**30:,.1f}: choose smaller ones"
            )


def _memory(device: torch.device) -> int | None:
    """Get the bytes of a device's memory, on a CPU this process's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = []
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = Path("/sys/fs/cgroup/memory.max")  # of a container
    if group.is_file() and (text := group.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=None)


class Usage:
    """Figures of a run's progress."""

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, ranks: int
    ) -> None:
        self._ranks, self._device = ranks, device
        rate, config = full_rate(device, dtype), model.config
        self._share: float | None = None  # MFU per token a second
        if rate is not None and isinstance(config, GPTConfig):
            parameters = sum(x.numel() for x in model.parameters())
            self._share = flops_per_token(config, parameters) / (ranks * rate)

    def figures(self, tokens_per_second: float) -> dict[str, float]:
        """Return JSON values by name: speed of all ranks, peak_mib of this one, and a GPT's mfu."""
        figures = {"tokens_per_second": round(tokens_per_second, 1)}
        if (peak := peak_mib(self._device)) is not None:
            figures["peak_mib"] = round(peak)
        if self._share is not None:
            figures["mfu"] = round(self._share * tokens_per_second, 4)
        return figures
