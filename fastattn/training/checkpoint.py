"""Checkpoints of a run: a folder per step, written atomically.

    step-00000500/
        model.safetensors   the weights; its metadata are configuration, tokenizer and step
        training.pt         optimizer and progress, read by torch.load with weights_only=True

Both are written under a hidden name, flushed and renamed; only then is the older one removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..missing import import_extra
from ..models.gpt import GPT
from ..models.stack import on_meta
from .tasks.kinds import KINDS, Kind
from .tokenizers import Tokenizer, from_json

MODEL, TRAINING = "model.safetensors", "training.pt"
_FORMAT, _DIGEST = "fastattn", "sha256"
_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"


class CheckpointError(OSError):
    """Error: a checkpoint cannot be written or read, or belongs to another run."""


@dataclass(frozen=True)
class Checkpoint:
    """State from which a model is built and its run continues.

    Args:
        step: optimizer steps done.
        model: parameters by name, as the model's `state_dict` gives them.
        tokenizer: of the run's text.
        config: JSON values: "kind" of the model (see `fastattn.training.tasks.kinds`), "model",
            "training" and "data", their settings, and "results".
        training: what only training needs, values of `torch.save`; empty in an imported model.
        source: its name in error messages.
        folder: where it was read.
    """

    step: int
    model: Mapping[str, Tensor]
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    source: str = "the checkpoint"
    folder: Path | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the model; CheckpointError if this version has no such kind."""
        name = self.config.get("kind", "gpt")
        if name not in KINDS:
            raise CheckpointError(
                f"{self.source} is of kind {name!r}, this fastattn has {', '.join(KINDS)}"
            )
        return KINDS[name]

    @property
    def model_config(self) -> Any:
        """The model's configuration; CheckpointError if it is missing or unusable."""
        try:
            return self.kind.config.from_dict(self.config["model"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.source} has no usable model config: {error}") from None

    def build(self) -> nn.Module:
        """Build the model with its weights, on the CPU; errors as `check`."""
        self.check()
        model = self.kind.build(self.model_config, self.config.get("data", {}))
        model.load_state_dict(self.model)
        return model

    def check(self) -> None:
        """Raise CheckpointError unless weights, configuration and tokenizer belong together."""
        config, data = self.model_config, self.config.get("data", {})
        check_tokenizer(self.tokenizer, config, self.source)
        try:
            self.check_fits(on_meta(lambda: self.kind.build(config, data)))
        except (MemoryError, OverflowError, RuntimeError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self.source} has no usable configuration: {error}") from None

    def check_fits(self, model: nn.Module) -> None:
        """Raise CheckpointError unless the model has the parameters of this checkpoint."""
        wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        saved = {name: tuple(x.shape) for name, x in self.model.items()}
        for name in sorted({*wanted, *saved}):
            if wanted.get(name) != saved.get(name):
                raise CheckpointError(
                    f"{self.source} has a different configuration: {name} has shape "
                    f"{saved.get(name, 'none')}, the model needs {wanted.get(name, 'none')}"
                )


def save_checkpoint(run_dir: str | Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a run's folder, then remove the older ones.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the folder holds one of this step or a later one; or it cannot be written
            and flushed, such as on a full disk. Older ones are kept.
    """
    run_dir = Path(run_dir)
    final = checkpoint_path(run_dir, checkpoint.step)
    temporary = run_dir / f"{_WRITING}{final.name}-{secrets.token_hex(4)}"
    try:
        older = _checkpoints(run_dir)
        if older and _step(older[-1]) >= checkpoint.step:
            raise CheckpointError(
                f"{run_dir} holds {older[-1].name} already, so {final.name} is not written there: "
                "choose another folder"
            )
        _write(temporary, checkpoint)
        temporary.rename(final)
        _flush(run_dir)
    except CheckpointError:
        raise
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept, cause = latest_checkpoint(run_dir), error.strerror or error
        if kept == final:
            raise CheckpointError(f"{final} may not survive a power cut: {cause}") from None
        state = f"{kept} is kept" if kept else "there is no earlier one"
        raise CheckpointError(f"cannot write checkpoint {final}: {cause}; {state}") from None
    for folder in older:
        _remove(folder)
    return final


def load_checkpoint(path: str | Path, *, training: bool = True) -> Checkpoint:
    """Read a checkpoint, all on the CPU; no code in its files runs.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        training: also read what only training needs.

    Raises:
        CheckpointError: there is none, or a file is missing, truncated or changed.
    """
    folder = find_checkpoint(path)
    tensors, config = _read_model(folder / MODEL)
    try:
        tokenizer, step = from_json(config.pop("tokenizer")), config.pop("step")
        digest = config.pop(TRAINING)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder / MODEL} has no usable metadata: {error}") from None
    state = _read_training(folder / TRAINING, digest) if training else {}
    return Checkpoint(step, tensors, tokenizer, config, state, f"checkpoint {folder}", folder)


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


def load_trained(path: str | Path, *kinds: str, device: torch.device | str = "cpu") -> Trained:
    """Build the model of a checkpoint, in evaluation mode.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        kinds: accepted kinds; none = any.
        device: where the model goes.

    Raises:
        CheckpointError: as `load_checkpoint`, or the checkpoint has another kind, or its parts do
            not belong together.
    """
    checkpoint = load_checkpoint(path, training=False)
    kind = checkpoint.kind
    if kinds and kind.name not in kinds:
        wanted = " or ".join(KINDS[name].title for name in kinds)
        raise CheckpointError(
            f"checkpoint {path} holds {kind.title}, {wanted} is needed: see fastattn {kind.use}"
        )
    model = checkpoint.build().to(device).eval()
    data = checkpoint.config.get("data", {})
    return Trained(kind, model, checkpoint.model_config, checkpoint.tokenizer, data)


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Build the GPT of a checkpoint, in evaluation mode; return it and its tokenizer.

    Raises:
        CheckpointError: as `load_trained`.
    """
    trained = load_trained(path, "gpt", device=device)
    assert isinstance(trained.model, GPT)
    return trained.model, trained.tokenizer


def check_tokenizer(tokenizer: Tokenizer, config: Any, owner: str) -> None:
    """Raise CheckpointError unless the model has an embedding for every id of the tokenizer."""
    for name in ("vocab_size", "source_vocab_size", "target_vocab_size"):
        size = getattr(config, name, tokenizer.vocab_size)
        if tokenizer.vocab_size > size:
            raise CheckpointError(
                f"{owner} has a tokenizer that does not belong to it: of {tokenizer.vocab_size} "
                f"ids, its model's {name} is {size}"
            )


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Name the folder of a step's checkpoint."""
    return run_dir / f"step-{step:08d}"


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Find a run's newest checkpoint, or None."""
    folders = _checkpoints(Path(run_dir))
    return folders[-1] if folders else None


def find_checkpoint(path: str | Path) -> Path:
    """Find the checkpoint at a path: the folder itself, or the newest of a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    own = (path / MODEL).exists() or _FOLDER.fullmatch(path.name)
    folder = path if own and path.is_dir() else latest_checkpoint(path)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return folder


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write and flush the files of a checkpoint, after removing what killed writes have left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.iterdir():
        if left.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir()
    buffer = io.BytesIO()
    torch.save(dict(checkpoint.training), buffer)
    state = buffer.getvalue()
    fields = {**checkpoint.config, "step": checkpoint.step}
    fields |= {"tokenizer": checkpoint.tokenizer.to_json(), TRAINING: _sha256(state)}
    tensors = _apart(checkpoint.model)
    fields[_DIGEST] = _digest(fields, tensors)
    metadata = {_FORMAT: json.dumps(fields)}
    weights = import_extra("safetensors.torch", "a checkpoint").save(tensors, metadata=metadata)
    for name, content in ((MODEL, weights), (TRAINING, state)):
        (folder / name).write_bytes(content)
        _flush(folder / name)
    _flush(folder)


def _read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata of a model.safetensors."""
    safetensors = import_extra("safetensors", "a checkpoint")
    if not path.exists() and (path.parent / "checkpoint.json").exists():
        raise CheckpointError(
            f"{path.parent} was written by an earlier fastattn: export it there (fastattn "
            "export-hf), and import it here (fastattn import-hf)"
        )
    try:
        path.open("rb").close()  # an error of the file system names its cause
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    # The Rust code raises its own exception type.
    except Exception as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    if _FORMAT not in metadata:
        raise CheckpointError(f"{path} is not of fastattn: its metadata have no {_FORMAT!r}")
    fields = json.loads(metadata[_FORMAT])
    if fields.pop(_DIGEST, None) != _digest(fields, tensors):
        raise CheckpointError(f"{path} is corrupt: its SHA-256 differs")
    return tensors, fields


def _read_training(path: Path, digest: str) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if _sha256(content) != digest:
        raise CheckpointError(f"{path} is truncated or corrupt: its SHA-256 differs")
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of metadata and tensors, in hexadecimal."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if x.numel():
            digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each with its own memory, as safetensors requires."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        x = tensor.detach().cpu().contiguous()
        shared = x.data_ptr() in seen and x.numel() > 0  # such as a tied embedding
        copies[name] = x.clone() if shared else x
        seen.add(x.data_ptr())
    return copies


def _flush(path: Path) -> None:
    """Flush a file or a folder's names to the disk, for a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _checkpoints(run_dir: Path) -> list[Path]:
    """List a run's checkpoints, the newest last."""
    if not run_dir.is_dir():
        return []
    folders = [x for x in run_dir.iterdir() if _FOLDER.fullmatch(x.name) and x.is_dir()]
    return sorted(folders, key=_step)


def _remove(folder: Path) -> None:
    """Rename a checkpoint, then remove it: half of it never looks complete."""
    doomed = folder.with_name(f"{_REMOVING}{folder.name}")
    try:
        folder.rename(doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)
