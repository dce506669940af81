"""Ranks that train together, as a trainer uses them; one process alone sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
from .degrees import Degrees, Split, ranks_started
from .recompute import blocks_of, recompute

_Value = TypeVar("_Value")


class Ranks(Protocol):
    """Interface to the ranks that train together, for a trainer."""

    first: bool
    """Whether this is the one that writes files and talks to the user."""
    split: Split

    def device(self, name: str) -> torch.device:
        """This rank's device, by the name that `resolve_device` takes."""

    def prepare(self, model: nn.Module, config: TrainConfig) -> Callable[..., Any]:
        """Shards a model, whose parameters are alike on every rank, and gives its forward."""

    def draw(self, task: Task, batch_size: int, generator: torch.Generator) -> Batch:
        """A global batch to train on, or of it the rows of this rank's part, for `part`."""

    def part(self, batch: Batch, device: torch.device) -> AbstractContextManager[Part]:
        """A context: this rank's `Part` of a global batch, for its forward and its backward."""

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which any method of the model can be called, by all ranks alike.

        Forward passes have come before, and nothing is trained in it.
        """

    def loss(self, forward: Callable[..., Any], part: Part) -> Tensor:
        """This rank's share of the mean loss over the global batch: the shares' sum."""

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Adds to the gradients; those of all ranks are summed up by the last pass of a step."""

    def clip(self, model: nn.Module, max_norm: float) -> None:
        """Bounds the norm of all gradients together."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' shares."""

    def share(self, total: Tensor) -> Tensor:
        """This rank's share of a value that all have; the inverse of `total`."""

    def model_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """A model's tensors for `save`."""

    def optimizer_tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """AdamW's for `save`: `optimizer.<parameter>.<step | exp_avg | exp_avg_sq>`."""

    def save(self, run_dir: Path, checkpoint: Checkpoint, *, background: bool) -> Path:
        """Writes a checkpoint; see `save_checkpoint` and `ShardedWriter`."""

    def wait(self) -> None:
        """Waits for what is written in the background, and raises its error."""

    def restore(
        self, found: Checkpoint | Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        """Reads model and optimizer from a checkpoint, of any split.

        Raises:
            CheckpointError: it does not suit them.
        """

    def agree(self, flag: bool) -> bool:
        """Whether it is so on any rank."""

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        """Return the first rank's result, or raise its error, on every rank."""


class Alone:
    """One process: nothing is split, and nothing is sent."""

    first = True
    split = Split()

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def prepare(self, model: nn.Module, config: TrainConfig) -> Callable[..., Any]:
        for block in blocks_of(model):
            recompute(block, config.activation_checkpointing)
        return torch.compile(model) if config.compile else model

    def draw(self, task: Task, batch_size: int, generator: torch.Generator) -> Batch:
        return task.draw("train", batch_size, generator)

    @contextmanager
    def part(self, batch: Batch, device: torch.device) -> Iterator[Part]:
        yield Part(batch.to(device), 0)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def loss(self, forward: Callable[..., Any], part: Part) -> Tensor:
        _, loss = forward(*part.batch.inputs, part.batch.targets, **part.batch.keywords)
        found: Tensor = loss
        return found

    def backward(self, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)

    def total(self, x: Tensor) -> Tensor:
        return x

    def share(self, total: Tensor) -> Tensor:
        return total

    def model_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()

    def optimizer_tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        return {
            f"optimizer.{name}.{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def save(self, run_dir: Path, checkpoint: Checkpoint, *, background: bool) -> Path:
        return save_checkpoint(run_dir, checkpoint)

    def wait(self) -> None: ...

    def restore(
        self, found: Checkpoint | Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Checkpoint:
        checkpoint = load_checkpoint(found) if isinstance(found, Path) else found
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
        return flag

    def decided(self, decide: Callable[[], _Value]) -> _Value:
        return decide()


def ranks_for(degrees: Degrees) -> AbstractContextManager[Ranks]:
    """The ranks that torchrun has started, as asked for, while the context lasts; or one alone.

    Raises:
        SplitError: the degrees do not multiply to them.
    """
    if ranks_started() == 1:
        degrees.split(1)
        return nullcontext(Alone())
    # One process needs none of what this imports.
    from .together import started

    return started(degrees)
