"""The trainer's interface to ranks, and its implementation for one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...modules.fused_weights import separated
from ..checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    restore_model,
    save_checkpoint,
)
from ..tasks.task import Batch, Task
from ..train_config import TrainConfig, resolve_device
from .batches import Part
from .degrees import Split
from .recompute import blocks_of, recompute

_Value = TypeVar("_Value")


class Ranks:
    """Interface of the ranks of a run, implemented for one process; see `together.Together`."""

    first = True
    """Whether this rank writes files and prints for the user."""
    split = Split()

    def device(self, name: str) -> torch.device:
        """This rank's device, by the name that `resolve_device` takes."""
        return resolve_device(name)

    def prepare(self, model: nn.Module, config: TrainConfig) -> Callable[..., Any]:
        """Shards a model, whose parameters are equal on every rank, and returns its forward."""
        for block in blocks_of(model):
            recompute(block, config.activation_checkpointing)
        return torch.compile(model) if config.compile else model

    def draw(self, task: Task, batch_size: int, generator: torch.Generator) -> Batch:
        """A global training batch, or only this rank's rows, as input of `part`."""
        return task.draw("train", batch_size, generator)

    def part(self, batch: Batch, device: torch.device) -> AbstractContextManager[Part]:
        """Context with this rank's `Part` of a global batch, for its forward and backward."""
        return nullcontext(Part(batch.to(device), None))

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context for calls of any of the model's methods, by all ranks.

        At least one forward pass must come before; training is not possible in it.
        """
        return nullcontext()

    def loss(self, forward: Callable[..., Any], part: Part) -> Tensor:
        """This rank's share of the global mean loss; the shares add up to it."""
        batch = part.batch
        count = {} if part.targets is None else {"target_count": part.targets}
        _, loss = forward(*batch.inputs, batch.targets, **batch.keywords, **count)
        mean: Tensor = loss
        return mean

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Accumulates gradients; the last pass of a step sums them over the ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float) -> None:
        """Clips the global norm of the gradients."""
        nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' shares."""
        return x

    def share(self, total: Tensor) -> Tensor:
        """This rank's share of a common value; the inverse of `total`."""
        return total

    def model_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """A model's tensors for `save`."""
        return model.state_dict()

    def optimizer_tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """AdamW's state for `save`: `optimizer.<parameter>.<step | exp_avg | exp_avg_sq>`."""
        return {
            f"optimizer.{name}.{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def save(self, run_dir: Path, checkpoint: Checkpoint, *, background: bool) -> Path:
        """Writes a checkpoint; see `save_checkpoint` and `ShardedWriter`."""
        return save_checkpoint(run_dir, checkpoint)

    def wait(self) -> None:
        """Waits for background writes, and raises their error."""

    def restore(
        self, source: Checkpoint | Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        """Reads model and optimizer from a checkpoint, of any split."""
        checkpoint = load_checkpoint(source) if isinstance(source, Path) else source
        restore_model(model, checkpoint)
        if checkpoint.step > 0:
            saved = separated(model, checkpoint.training, "optimizer.")
            try:
                for name, parameter in model.named_parameters():
                    shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
                    optimizer.state[parameter] = {
                        key: saved[f"optimizer.{name}.{key}"].to(parameter.device).reshape(shape)
                        for key, shape in shapes.items()
                    }
            except KeyError as error:
                raise CheckpointError(f"{checkpoint.source} has no entry {error}") from None
            except RuntimeError as error:
                message = f"{checkpoint.source} has an unusable state: {error}"
                raise CheckpointError(message) from None
        return checkpoint

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        """Return the first rank's result, or raise its error, on every rank."""
        return decide()
