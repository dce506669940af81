"""Checkpoints: safetensors and JSON files, written atomically, so that a kill leaves a whole one.

A run's folder holds its checkpoints as folders `step-NNNNNNNN`:

    checkpoint.json        configuration, progress, and size and SHA-256 of the files below
    model.safetensors      the parameters
    training.safetensors   optimizer moments and random generator states
    tokenizer.json         the tokenizer

In a sharded checkpoint (`fastattn.training.sharded`) each rank writes its own two safetensors
files, such as `shard-RANK-model-00001-of-00002.safetensors`. They are read here as well.

A checkpoint is written and flushed under a temporary name, then renamed; older ones are removed
last. So every folder `step-*` is complete, and the highest number is the newest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.gpt import GPT
from ..modules.fused_weights import separated
from . import storage
from .extras import import_extra
from .storage import MANIFEST, MODEL, TOKENIZER, TRAINING, Manifest, apart, entry_of
from .storage import CheckpointError as CheckpointError
from .storage import find_checkpoint as find_checkpoint
from .storage import latest_checkpoint as latest_checkpoint
from .tasks.kinds import KINDS, Kind
from .tokenizers import Tokenizer, TokenizerError, from_json


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run can resume.

    Args:
        step: optimizer steps done.
        model: parameters by name, as the model's `state_dict` gives them.
        training: further tensors by name: optimizer moments, generator states.
        tokenizer: of the run's text.
        config: the run's configuration, JSON values only; "kind" names the kind of the model (see
            `fastattn.training.tasks.kinds`), "model" holds its config's `to_dict`.
        state: further progress, JSON values only.
        source: its name in error messages.
        folder: where it was read.
    """

    step: int
    model: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    source: str = "the checkpoint"
    folder: Path | None = None

    def require(self, *names: str) -> Any:
        """Value in "config" or "state" at a path of keys.

        Raises:
            CheckpointError: there is none.
        """
        value: Any = {"config": self.config, "state": self.state}
        for name in names:
            if name not in value:
                raise CheckpointError(f"{self.source} has no entry {'.'.join(names)!r}")
            value = value[name]
        return value


def save_checkpoint(run_dir: str | Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint into a run's folder, then removes the older ones.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the folder holds one of this step or a later one; or it cannot be written
            and flushed, such as on a full disk. Older ones are kept.
    """
    final = storage.checkpoint_path(Path(run_dir), checkpoint.step)
    try:
        storage.begin(final)
        storage.publish(final, _serialise(checkpoint))
    except OSError as error:
        storage.discard(final)
        raise storage.write_error(final, error) from None
    return final


def load_checkpoint(
    path: str | Path, *, device: torch.device | str = "cpu", training: bool = True
) -> Checkpoint:
    """Reads a checkpoint and checks the sizes and digests of its files.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        device: of the model's tensors; the others stay on the CPU. "meta" = read only names, dtypes
            and shapes, and check only file sizes.
        training: also read the tensors that only training needs.

    Raises:
        CheckpointError: there is none, or it is truncated, changed, or of another format.
    """
    folder = find_checkpoint(path)
    manifest = storage.read_manifest(folder)
    source = f"checkpoint {folder}"
    try:
        tokenizer = from_json(manifest.read(TOKENIZER).decode("utf-8"))
    except (TokenizerError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source}: {TOKENIZER}: {error}") from None
    only_shapes = torch.device(device).type == "meta"
    model = _tensors(manifest, manifest.model_files, only_shapes)
    return Checkpoint(
        step=manifest.step,
        model={name: tensor.to(device) for name, tensor in model.items()},
        training=_tensors(manifest, manifest.training_files, only_shapes) if training else {},
        tokenizer=tokenizer,
        config=manifest.config,
        state=manifest.state,
        source=source,
        folder=folder,
    )


def _tensors(manifest: Manifest, names: list[str], only_shapes: bool) -> dict[str, Tensor]:
    """The tensors of some files of a checkpoint."""
    torch_format = import_extra("safetensors.torch", "a checkpoint")
    if manifest.sharded or only_shapes:
        # Slow to import, and most checkpoints are not sharded.
        from .shards import ShardReader, read_tensors

        tensors = ShardReader(manifest, names).shapes()
        if not only_shapes:
            tensors = {name: torch.empty_like(x, device="cpu") for name, x in tensors.items()}
            read_tensors(manifest, names, tensors)
        return tensors
    (name,) = names
    content = manifest.read(name)
    try:
        loaded: dict[str, Tensor] = torch_format.load(content)
    # The Rust code raises its own exception type, the Python code any.
    except Exception as error:
        raise CheckpointError(f"{manifest.folder / name} is corrupt: {error}") from None
    return loaded


@dataclass(frozen=True)
class Trained:
    """Contents of a checkpoint, ready for use.

    Args:
        kind: kind of the model.
        model: the model, in evaluation mode.
        config: configuration of the model.
        tokenizer: tokenizer of its texts.
        data: description of its training data, from the run's configuration.
    """

    kind: Kind
    model: Any
    config: Any
    tokenizer: Tokenizer
    data: Mapping[str, Any]


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Builds the GPT of a checkpoint, in evaluation mode, and its tokenizer.

    `load_trained` does so for the other kinds of models.

    Raises:
        CheckpointError: as `load_checkpoint`, the checkpoint holds another kind of model, or its
            parts do not belong together.
    """
    trained = load_trained(path, "gpt", device=device)
    assert isinstance(trained.model, GPT)
    return trained.model, trained.tokenizer


def kind_of(checkpoint: Checkpoint) -> Kind:
    """The checkpoint's kind of model; GPT where it names none.

    Raises:
        CheckpointError: this version has no such kind.
    """
    name = checkpoint.config.get("kind", "gpt")
    if name not in KINDS:
        raise CheckpointError(
            f"{checkpoint.source} is of kind {name!r}, this fastattn has {', '.join(KINDS)}"
        )
    return KINDS[name]


def load_trained(path: str | Path, *kinds: str, device: torch.device | str = "cpu") -> Trained:
    """Builds the model of a checkpoint, in evaluation mode.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        kinds: names of the kinds that will do; none = any.
        device: where the model goes.

    Raises:
        CheckpointError: as `load_checkpoint`, or the checkpoint is of another kind, or its parts do
            not belong together.
    """
    checkpoint = load_checkpoint(path, device=device, training=False)
    kind = kind_of(checkpoint)
    if kinds and kind.name not in kinds:
        wanted = " or ".join(KINDS[name].title for name in kinds)
        raise CheckpointError(
            f"checkpoint {path} holds {kind.title}, {wanted} is needed: see fastattn {kind.use}"
        )
    config = config_of(checkpoint)
    if kind.name == "tagger":
        for name in ("tags", "python"):
            checkpoint.require("config", "data", name)
    data = checkpoint.config.get("data", {})
    check_build(lambda: kind.build(config, data), checkpoint)
    model = kind.build(config, data).to(device)
    check_tokenizer(checkpoint.tokenizer, config, checkpoint.source)
    restore_model(model, checkpoint)
    return Trained(kind, model.eval(), config, checkpoint.tokenizer, data)


def config_of(checkpoint: Checkpoint) -> Any:
    """The configuration of a checkpoint's model.

    Raises:
        CheckpointError: its kind is unknown, or its configuration is missing or unusable.
    """
    fields = checkpoint.require("config", "model")
    try:
        config = kind_of(checkpoint).config.from_dict(fields)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.source} has no usable model config: {error}") from None
    for name in ("num_layers", "num_decoder_layers"):
        layers = getattr(config, name, None) or 0
        if layers > len(checkpoint.model):
            raise CheckpointError(
                f"{checkpoint.source} has no usable model config: {name} is {layers}, "
                f"and there are {len(checkpoint.model)} parameters"
            )
    return config


def check_tokenizer(tokenizer: Tokenizer, config: Any, owner: str) -> None:
    """Check that the model has an embedding for every id of the tokenizer.

    Raises:
        CheckpointError: it does not: the tokenizer belongs to another model.
    """
    for name in ("vocab_size", "source_vocab_size", "target_vocab_size"):
        size = getattr(config, name, tokenizer.vocab_size)
        if tokenizer.vocab_size > size:
            raise CheckpointError(
                f"{owner} has a tokenizer that does not belong to it: of {tokenizer.vocab_size} "
                f"ids, its model's {name} is {size}"
            )


def restore_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's parameters into a model.

    Raises:
        CheckpointError: as `check_fits`.
    """
    check_fits(model, checkpoint)
    model.load_state_dict(separated(model, checkpoint.model))


def check_fits(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint has this model's parameters.

    Raises:
        CheckpointError: names or shapes differ: the checkpoint is of another configuration.
    """
    parts = dataclasses.replace(checkpoint, model=separated(model, checkpoint.model))
    check_shapes(model.state_dict(), parts)


def check_shapes(tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """`check_fits` for tensors by name."""
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
    for name in sorted({*wanted, *saved}):
        if wanted.get(name) != saved.get(name):
            raise CheckpointError(
                f"{checkpoint.source} is of another configuration: {name} has shape "
                f"{saved.get(name, 'none')}, the model needs {wanted.get(name, 'none')}"
            )


def check_build(build: Callable[[], nn.Module], checkpoint: Checkpoint) -> None:
    """`check_fits` before the model is built, as its sizes may be impossibly large.

    Raises:
        CheckpointError: as `check_fits`, or no memory could ever hold the model.
    """
    try:
        with torch.device("meta"):
            model = build()
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.source} is of another configuration, of impossible sizes: {error}"
        ) from None
    check_fits(model, checkpoint)


def _serialise(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Contents of the files by name, the manifest last."""
    torch_format = import_extra("safetensors.torch", "a checkpoint")
    contents = {
        MODEL: torch_format.save(_on_cpu(checkpoint.model)),
        TRAINING: torch_format.save(_on_cpu(checkpoint.training)),
        TOKENIZER: checkpoint.tokenizer.to_json().encode("utf-8"),
    }
    files = {name: entry_of(content) for name, content in contents.items()}
    manifest = storage.write_manifest(checkpoint.step, checkpoint.config, checkpoint.state, files)
    return {**contents, MANIFEST: manifest}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return apart({name: x.cpu().contiguous() for name, x in tensors.items()})
