"""Sharded checkpoints: written by all ranks, read with any other split.

A trainer keeps one writer for a run, with the interface of `save_checkpoint`:

    writer = ShardedWriter(out_dir, background=True)
    ...
    training = {**optimizer_tensors(model, optimizer), "random.cpu": torch.get_rng_state()}
    writer.save(Checkpoint(step, model_tensors(model), training, tokenizer, config, state))
    ...
    writer.wait()  # at the end: an error of the last save is raised here

and resumes, with any number of ranks and any split, by

    path = latest_checkpoint(out_dir)
    shapes = load_checkpoint(path, device="meta")  # configuration and tokenizer, to build the model
    checkpoint = restore_sharded(path, model, optimizer)
    torch.set_rng_state(checkpoint.training["random.cpu"])

`load_checkpoint` (in one process) and `restore_sharded` read both kinds of checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from . import storage
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    check_shapes,
    find_checkpoint,
    load_checkpoint,
)
from .shards import agree, read_tensors
from .storage import MANIFEST, TOKENIZER, apart, entry_of, entry_of_file, read_manifest

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_OPTIMIZER, _STATE = "optimizer.", "state."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors under the plain model's names; sharded ones are DTensors."""
    return cast(dict[str, Tensor], get_model_state_dict(model))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state: `optimizer.<parameter>.<step | exp_avg | exp_avg_sq>`, for AdamW.

    Empty before the first step. Learning rates and the like are configuration, not state.
    """
    if not optimizer.state:
        return {}
    return {_OPTIMIZER + name.removeprefix(_STATE): x for name, x in _state(model, optimizer)}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return [(name, cast(Tensor, x)) for name, x in state.items() if name.startswith(_STATE)]


class ShardWriter(HuggingFaceStorageWriter):
    """Writes a rank's shards, and publishes the checkpoint when all ranks are done."""

    def __init__(self, final: Path, checkpoint: Checkpoint) -> None:
        # Number of each tensor's file: 1 = the model's, 2 = the others.
        files = dict.fromkeys(checkpoint.model, 1) | dict.fromkeys(checkpoint.training, 2)
        super().__init__(str(storage.writing_path(final)), files, save_distributed=True)
        self._final, self._checkpoint = final, checkpoint

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes."""
        storage.begin(self._final)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        for name, count in Counter(item.index.fqn for item in plan.items).items():
            if count > 1:
                # A file has one entry a name: the others would be lost.
                raise CheckpointError(f"{name} has {count} parts on a rank, not one")
        written = super().write_data(plan, planner).wait()
        results = []
        for name in sorted({result.storage_data.relative_path for result in written}):
            path = Path(self.path) / name
            # torch's own flush comes before the end of its buffer is written.
            with path.open("rb") as file:
                os.fsync(file.fileno())
            results.append(WriteResult(MetadataIndex(name), 0, entry_of_file(path)))
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, after all ranks have written."""
        entries = {result.index.fqn: result.storage_data for rank in results for result in rank}
        own = self._checkpoint
        tokenizer = own.tokenizer.to_json().encode("utf-8")
        files = {**dict(sorted(entries.items())), TOKENIZER: entry_of(tokenizer)}
        manifest = storage.write_manifest(own.step, own.config, own.state, files)
        storage.publish(self._final, {TOKENIZER: tokenizer, MANIFEST: manifest})


class ShardedWriter:
    """Writes a run's checkpoints, each rank its part; a kill leaves a whole one.

    A checkpoint is written and flushed under a temporary name; when all ranks are done, rank 0
    renames it, then removes older ones. So the newest folder `step-NNNNNNNN` is complete, whichever
    ranks die.

    All ranks of the group make a writer and call it at the same steps. The folder is on shared
    storage.

    Args:
        run_dir: the run's folder.
        group: a gloo group of the model's ranks, for the writer alone, as its thread's messages may
            not mix with training's; None = a new group of all ranks.
        background: `save` copies the tensors to the CPU and returns, and a thread writes them. The
            next `save` waits for it.

    Raises:
        ValueError: there is no process group.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        background: bool = False,
    ) -> None:
        _group_or_all("ShardedWriter", group)
        self._run_dir, self._background = Path(run_dir), background
        self._group = dist.new_group(backend="gloo") if group is None else group
        self._pending: tuple[Path, Future[Any]] | None = None

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove the older ones.

        Args:
            checkpoint: equal on every rank, except for the shards of DTensors. One rank writes each
                other tensor.

        Returns:
            The checkpoint's folder; with `background` it exists after the next `wait`.

        Raises:
            CheckpointError: this checkpoint, or with `background` the one before, cannot be
                written and flushed, such as on a full disk, or the folder holds one of its step or
                a later one. Older ones are kept, and all ranks raise it.
            ValueError: model and training have a name in common.
        """
        self.wait()
        final = storage.checkpoint_path(self._run_dir, checkpoint.step)
        if both := checkpoint.model.keys() & checkpoint.training.keys():
            raise ValueError(f"model and training must differ in names, both have {min(both)!r}")
        tensors = apart({**checkpoint.model, **checkpoint.training})
        writer = ShardWriter(final, checkpoint)
        if self._background:
            saving = state_dict_saver.async_save(
                tensors, storage_writer=writer, process_group=self._group
            )
            self._pending = (
                final,
                saving if isinstance(saving, Future) else saving.upload_completion,
            )
            return final
        try:
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            raise self._failed(final, error) from None
        return final

    def wait(self) -> None:
        """Wait for the checkpoint written in the background, and raise its error."""
        if self._pending is None:
            return
        (final, future), self._pending = self._pending, None
        try:
            future.result()
        except CheckpointException as error:
            raise self._failed(final, error) from None

    def _failed(self, final: Path, error: CheckpointException) -> CheckpointError:
        if dist.get_rank(self._group) == 0:
            storage.discard(final)
        dist.barrier(self._group)
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, OSError):
            raise cause
        return storage.write_error(final, cause, by=f"rank {rank}: ")


def restore_sharded(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Checkpoint:
    """Read a checkpoint of either kind into a model and an optimizer with any split.

    All ranks of the group call it; each reads its own part.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        model: the plain model, or one of sharded parameters.
        optimizer: of the model's parameters; None = restore the model alone.
        group: of the ranks that hold the model; None = all.

    Returns:
        The checkpoint, without the model's tensors and the optimizer's.

    Raises:
        CheckpointError: as `load_checkpoint` and `check_fits`, before anything is changed. All
            ranks raise it.
        ValueError: there is no process group.
    """
    group = _group_or_all("restore_sharded", group)
    model_part = model_tensors(model)
    checkpoints: list[Checkpoint] = []

    def look() -> None:
        checkpoints.append(load_checkpoint(path, device="meta"))
        check_shapes(model_part, checkpoints[0])

    agree(look, group)
    (checkpoint,) = checkpoints
    saved = {name for name in checkpoint.training if name.startswith(_OPTIMIZER)}
    state: dict[str, Any] = {}
    if optimizer is not None and saved:
        state = _state_like(checkpoint, saved, model, optimizer)
    others = {
        name: torch.empty_like(x, device="cpu")
        for name, x in checkpoint.training.items()
        if name not in saved
    }
    manifest = read_manifest(find_checkpoint(path))
    named = {_OPTIMIZER + name.removeprefix(_STATE): x for name, x in state.items()}
    tensors = {**model_part, **named, **others}
    read_tensors(manifest, manifest.model_files + manifest.training_files, tensors, group)
    set_model_state_dict(model, dict(model_part))
    if optimizer is not None and state:
        flat = get_optimizer_state_dict(model, optimizer, options=_OPTIONS) | state
        set_optimizer_state_dict(model, optimizer, flat, options=_OPTIONS)
    return dataclasses.replace(checkpoint, model={}, training=others)


def _group_or_all(name: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(f"{name} needs a process group: torch.distributed has none")
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    return process_group


def _state_like(
    checkpoint: Checkpoint, saved: set[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """An optimizer's state, initialised if empty, as the target of a checkpoint's."""
    fresh = not optimizer.state
    state = dict(_state(model, optimizer))
    shapes = {_OPTIMIZER + name.removeprefix(_STATE): x.shape for name, x in state.items()}
    for name in sorted({*shapes, *saved}):
        got = tuple(checkpoint.training[name].shape) if name in saved else "none"
        want = tuple(shapes.get(name, ())) if name in shapes else "none"
        if got != want:
            if fresh:
                optimizer.state.clear()
            raise CheckpointError(
                f"{checkpoint.source} is of another configuration: {name} has shape {got}, the "
                f"optimizer needs {want}"
            )
    return state
