"""Settings of a training run, each field with its help, check and option."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..models.fields import check_fields, from_fields

# Without torch at import: the command's --help reads this file.
if TYPE_CHECKING:
    import torch

Check = tuple[str, Callable[[Any], bool]]
_COUNT: Check = ("at least 1", lambda x: x >= 1)
_AMOUNT: Check = ("at least 0", lambda x: x >= 0)
_SHARE: Check = ("in [0, 1)", lambda x: 0 <= x < 1)


def setting(
    default: Any,
    help: str,
    *,
    flag: str = "",
    check: Check | None = None,
    path: str = "",
) -> Any:
    """Make a field of a configuration that `fastattn train` has an option for.

    Args:
        default: its value.
        help: the text of --help, without the default.
        flag: the option; "" = the field's name.
        check: what a value must be, and whether it is; None passes unchecked.
        path: "FILE" or "DIR", of paths that the command makes absolute.
    """
    metadata = {"help": help, "flag": flag, "check": check, "path": path}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(config: Any) -> None:
    """Check a configuration's fields.

    Raises:
        ValueError: one is of a wrong type or out of range.
    """
    check_fields(config)
    for field in dataclasses.fields(config):
        value, check = getattr(config, field.name), field.metadata["check"]
        if check and value is not None and not check[1](value):
            raise ValueError(f"{field.name} must be {check[0]}, got {value}")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop; the defaults suit about a million parameters.

    `fastattn train --help` lists them. Weights are float32 in every dtype.

    Raises:
        ValueError: a field is of a wrong type or out of range, or fields disagree.
    """

    steps: int = setting(2000, "optimizer steps", check=_COUNT)
    batch_size: int = setting(
        12,
        "examples per forward pass, over all ranks",
        flag="--batch",
        check=_COUNT,
    )
    accumulation: int = setting(
        1, "gradient accumulation: forward passes per step", flag="--accumulate", check=_COUNT
    )
    learning_rate: float = setting(
        3e-3,
        "learning rate of AdamW after warm-up",
        flag="--lr",
        check=("positive", lambda x: x > 0),
    )
    min_learning_rate: float | None = setting(
        None,
        "learning rate of the last step (default: a tenth of --lr)",
        flag="--min-lr",
        check=_AMOUNT,
    )
    warmup_steps: int | None = setting(
        None, "steps of linear warm-up (default: 5 %% of --steps)", flag="--warmup", check=_AMOUNT
    )
    weight_decay: float = setting(0.1, "weight decay of matrices; vectors have none", check=_AMOUNT)
    beta1: float = setting(0.9, "decay of AdamW's first moment", check=_SHARE)
    beta2: float = setting(0.99, "decay of AdamW's second moment", check=_SHARE)
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0: no clipping", check=_AMOUNT)
    eval_interval: int = setting(
        250, "steps between estimates of the validation loss", flag="--eval-every", check=_COUNT
    )
    eval_batches: int = setting(20, "batches per estimate", check=_COUNT)
    log_interval: int = setting(
        10, "steps between lines of metrics.jsonl", flag="--log-every", check=_COUNT
    )
    checkpoint_interval: int = setting(
        500, "steps between checkpoints", flag="--save-every", check=_COUNT
    )
    seed: int = setting(
        0,
        "seed of weights, batches and dropout",
        check=("in [0, 2**63)", lambda x: 0 <= x < 2**63),
    )
    device: str = setting("auto", "auto (a GPU, if there is one), cpu, cuda or cuda:<index>")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of activations: auto is bfloat16 on a GPU that has it, else float32"
    )
    compile: bool = setting(False, "use torch.compile")
    activation_checkpointing: bool = setting(False, "recompute layers in the backward pass")
    fsdp: bool = setting(
        False, "several ranks: shard weights and optimizer states (FSDP2) instead of DDP"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.min_learning_rate or 0) > self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be in [0, learning_rate={self.learning_rate}], got "
                f"{self.min_learning_rate}"
            )
        if (self.warmup_steps or 0) > self.steps:
            raise ValueError(
                f"warmup_steps must be in [0, steps={self.steps}], got {self.warmup_steps}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """Make a configuration from `to_dict`'s result.

        Raises:
            ValueError: a field is unknown, of a wrong type or out of range.
        """
        return from_fields(cls, fields)

    def learning_rate_at(self, step: int) -> float:
        """Compute the learning rate of a step, from 0: linear warm-up, then half a cosine."""
        low = self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate
        warmup = self.steps // 20 if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return self.learning_rate * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, self.steps - warmup)
        return low + 0.5 * (1 + math.cos(math.pi * done)) * (self.learning_rate - low)


@dataclass(frozen=True)
class DataConfig:
    """Training data and tokenizer; each kind of model uses some fields.

    Raises:
        ValueError: there are no such pairs, or text is combined with pairs or prepared.
    """

    text: tuple[str, ...] = setting(
        (),
        "UTF-8 text; tagging: CoNLL files; translation: lines of source, a tab, and target "
        "(default: the standard library)",
        path="FILE",
    )
    prepared: str | None = setting(
        None,
        "gpt: token files of fastattn prepare, in place of --text and --tokenizer",
        flag="--data",
        path="DIR",
    )
    validation: tuple[str, ...] = setting(
        (),
        "tagging, translation: files to validate on (default: the last tenth of --text)",
        path="FILE",
    )
    tokenizer: str | None = setting(
        None,
        "char (default of gpt), bpe (byte-level; default of the others), word, word-space "
        "and word-sign (both keep white space), char-bpe, wordpiece, unigram; or a tokenizer's "
        "JSON file, a .txt file with one token a line, a folder with GPT-2's vocab.json and "
        "merges.txt, or the name of a tiktoken encoding",
    )
    vocab_size: int = setting(1024, "size of the vocabulary to train, except for char")
    start_from: str | None = setting(
        None, "tagging: start from the encoder and tokenizer of a masked run", path="DIR"
    )
    pairs: Literal["names", "dates"] | None = setting(
        None,
        "translation without --text: docstrings to function names (names, the default), or "
        "dates to words",
    )
    truncate: bool = setting(False, "translation: cut texts that are too long, instead of an error")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.prepared is not None and (self.text or self.tokenizer):
            raise ValueError(
                "prepared data replace a text and a tokenizer: leave out one of the two"
            )
        if self.pairs is not None and self.text:
            raise ValueError("pairs are generated without a text: leave out one of the two")
        if self.start_from is not None and self.tokenizer is not None:
            raise ValueError("start_from has its own tokenizer: leave out tokenizer")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Choose the dtype of activations on a device.

    Raises:
        ValueError: it is float16 on the CPU.
    """
    import torch

    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "float16" and device.type == "cpu":
        raise ValueError("dtype must be 'float32' or 'bfloat16' on the CPU, got 'float16'")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_device(name: str) -> torch.device:
    """Get a torch device by name; "auto" is the first GPU if torch sees one, else the CPU.

    Raises:
        ValueError: the name is unknown, or torch does not see this GPU.
    """
    import torch

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
