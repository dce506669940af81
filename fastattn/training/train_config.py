"""Training settings, their defaults and checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..models.fields import from_fields

Recompute = Literal["none", "full", "selective"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run. The defaults suit a model of about a million parameters.

    Args:
        steps: optimizer steps.
        batch_size: windows, sentences or pairs per forward pass.
        accumulation: forward passes per step; their gradients are averaged.
        learning_rate: of AdamW, after warm-up.
        min_learning_rate: at the last step; None = a tenth of learning_rate.
        warmup_steps: steps of linear rise before the cosine; None = 5 % of steps.
        weight_decay: of matrices; vectors (norms, biases) have none.
        beta1, beta2: AdamW's averaging factors.
        grad_clip: largest norm of all gradients together; 0 = no clipping.
        eval_interval: steps between two estimates of the validation loss.
        eval_batches: batches per estimate; the final loss is over the whole split.
        log_interval: steps between two lines of metrics.jsonl.
        checkpoint_interval: steps between two checkpoints.
        seed: of weights, batches and dropout.
        device: "auto" (a GPU if there is one) or a torch device.
        dtype: of activations, "float32", "bfloat16", "float16" or "auto" (bfloat16 on a GPU that
            supports it, else float32). Weights are float32; sharded weights are gathered in this
            dtype, and gradients are summed in float32.
        compile: compile the model with torch.compile; on several ranks each layer.
        activation_checkpointing: recomputation in backward passes: "none", "full" layers, or
            "selective", layers without attention.
        save_in_background: train while a checkpoint is written; on several ranks.

    Raises:
        ValueError: a field is out of range, or fields disagree.
    """

    steps: int = 2000
    batch_size: int = 12
    accumulation: int = 1
    learning_rate: float = 3e-3
    min_learning_rate: float | None = None
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0
    eval_interval: int = 250
    eval_batches: int = 20
    log_interval: int = 10
    checkpoint_interval: int = 500
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    activation_checkpointing: Recompute = "none"
    save_in_background: bool = False

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulation", "eval_interval", "eval_batches")
        for name in (*counts, "log_interval", "checkpoint_interval"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _check(self.learning_rate > 0, "learning_rate", "positive", self.learning_rate)
        low = self.min_learning_rate
        in_range = low is None or 0 <= low <= self.learning_rate
        _check(in_range, "min_learning_rate", f"in [0, learning_rate={self.learning_rate}]", low)
        warmup = self.warmup_steps
        in_range = warmup is None or 0 <= warmup <= self.steps
        _check(in_range, "warmup_steps", f"in [0, steps={self.steps}]", warmup)
        for name in ("weight_decay", "grad_clip"):
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("beta1", "beta2"):
            _check(0 <= getattr(self, name) < 1, name, "in [0, 1)", getattr(self, name))
        _check(0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        kinds, got = get_args(Recompute), self.activation_checkpointing
        _check(got in kinds, "activation_checkpointing", f"one of {', '.join(kinds)}", repr(got))
        names = ("auto", *_DTYPES)
        _check(self.dtype in names, "dtype", f"one of {', '.join(names)}", repr(self.dtype))

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """Inverse of `to_dict`.

        Raises:
            ValueError: a field is unknown, of a wrong type or out of range.
        """
        return from_fields(cls, fields)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0: linear warm-up, then half a cosine."""
        low = self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate
        warmup = self.steps // 20 if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return self.learning_rate * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, self.steps - warmup)
        return low + 0.5 * (1 + math.cos(math.pi * done)) * (self.learning_rate - low)

    def resolve_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of activations on a device.

        Raises:
            ValueError: dtype is float16 on the CPU.
        """
        if self.dtype == "auto":
            has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if has_bf16 else torch.float32
        if self.dtype == "float16" and device.type == "cpu":
            raise ValueError("dtype must be 'float32' or 'bfloat16' on the CPU, got 'float16'")
        return _DTYPES[self.dtype]


def resolve_device(name: str) -> torch.device:
    """A torch device by name; "auto" is the first GPU if torch sees one, else the CPU.

    Raises:
        ValueError: the name is unknown, or torch does not see this GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one that torch sees ({torch.cuda.device_count()} GPUs), got {name!r}"
        )
    return device


def _check(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {got}")
