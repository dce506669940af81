"""Device use of training: operations per token, MFU, memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..models.gpt import GPTConfig

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
    """Operations of training per token, without recomputation.

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
    """A GPU's dense bf16 rate from its data sheet; None for unknown GPUs."""
    return next((rate for gpu, rate in _DENSE_BF16.items() if gpu in name), None)


def full_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak rate for MFU, in operations a second; None if unknown.

    dtype: of matrix products; the table has 16-bit rates only.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return None
    tflops = dense_bf16_tflops(torch.cuda.get_device_name(device))
    return None if tflops is None else 1e12 * tflops


def peak_mib(device: torch.device) -> float | None:
    """Peak memory in MiB: torch's on a GPU, or this process's on a CPU.

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


class Usage:
    """Figures of a run's progress derived from its speed.

    Operations are counted only for a GPT. parameters: trained scalars of the whole model.
    """

    def __init__(
        self, config: Any, parameters: int, ranks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._ranks, self._device = ranks, device
        rate = full_rate(device, dtype)
        self._share: float | None = None  # MFU per token a second
        if rate is not None and isinstance(config, GPTConfig):
            self._share = flops_per_token(config, parameters) / (ranks * rate)

    def figures(self, tokens_per_second: float) -> dict[str, float]:
        """JSON values by name: speed (on several ranks also per rank), peak_mib and mfu if known.

        Args:
            tokens_per_second: speed of all ranks together.
        """
        figures = {"tokens_per_second": round(tokens_per_second, 1)}
        if self._ranks > 1:
            figures["tokens_per_second_per_rank"] = round(tokens_per_second / self._ranks, 1)
        if (peak := peak_mib(self._device)) is not None:
            figures["peak_mib"] = round(peak)
        if self._share is not None:
            figures["mfu"] = round(self._share * tokens_per_second, 4)
        return figures
