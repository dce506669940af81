"""Checkpoints on disk: safetensors and JSON, written so that a kill at any moment leaves one whole.

A run's folder holds its checkpoints as folders `step-NNNNNNNN`:

    checkpoint.json        configuration, progress, and size and SHA-256 of the files below
    model.safetensors      the parameters
    training.safetensors   optimizer moments and random generator states
    tokenizer.json         the tokenizer

A checkpoint is written and flushed under a temporary name, renamed in one step, and only then are
older ones removed. So a folder with such a name is complete, and the highest number is the newest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.gpt import GPT
from .extras import import_extra
from .manifest import MANIFEST, MODEL, TOKENIZER, TRAINING, read_manifest, write_manifest
from .manifest import CheckpointError as CheckpointError
from .tokenizers import Tokenizer, TokenizerError, from_json

_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on.

    Args:
        step: optimizer steps done.
        model: parameters by name, as the model's `state_dict` gives them.
        training: further tensors by name: optimizer moments, generator states.
        tokenizer: of the run's text.
        config: the run's configuration, JSON values only; "kind" names the kind of the model (see
            `fastattn.training.kinds`), "model" holds its config's `to_dict`.
        state: further progress, JSON values only.
        source: what messages call it.
    """

    step: int
    model: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    source: str = "the checkpoint"

    def require(self, *names: str) -> Any:
        """A value of "config" or "state", by the names that lead to it.

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

    Nothing is done if the folder has a checkpoint of this step already.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written and flushed, such as on a full disk. Older ones are
            kept.
    """
    run_dir = Path(run_dir)
    final = run_dir / f"step-{checkpoint.step:08d}"
    if final.exists():
        return final
    temporary = run_dir / f"{_WRITING}{final.name}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(run_dir)
        older = _checkpoints(run_dir)
        temporary.mkdir()
        for name, content in _serialise(checkpoint).items():
            _write_durably(temporary / name, content)
        _flush_folder(temporary)
        os.rename(temporary, final)
        _flush_folder(run_dir)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _write_error(run_dir, final, error) from None
    for folder in older:
        _remove(folder)
    return final


def load_checkpoint(
    path: str | Path, *, device: torch.device | str = "cpu", training: bool = True
) -> Checkpoint:
    """Reads a checkpoint whole and checks it against its own sizes and digests.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        device: where the model's tensors go; the others stay on the CPU.
        training: read what only training needs as well, not the model and tokenizer alone.

    Raises:
        CheckpointError: there is none, or it is truncated, changed, or of another format.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    names = (MODEL, TRAINING, TOKENIZER) if training else (MODEL, TOKENIZER)
    contents = {name: manifest.read(name) for name in names}
    source = f"checkpoint {folder}"
    try:
        tokenizer = from_json(contents[TOKENIZER].decode("utf-8"))
    except (TokenizerError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source}: {TOKENIZER}: {error}") from None
    model = _tensors(folder / MODEL, contents[MODEL])
    return Checkpoint(
        step=manifest.step,
        model={name: tensor.to(device) for name, tensor in model.items()},
        training=_tensors(folder / TRAINING, contents[TRAINING]) if training else {},
        tokenizer=tokenizer,
        config=manifest.config,
        state=manifest.state,
        source=source,
    )


def _tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    torch_format = import_extra("safetensors.torch", "a checkpoint")
    try:
        found: dict[str, Tensor] = torch_format.load(content)
    # The Rust side raises an exception of its own, the Python side what it meets.
    except Exception as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    return found


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Builds the GPT of a checkpoint, in evaluation mode, and its tokenizer.

    `fastattn.training.kinds.load_trained` does so for the other kinds of models.

    Raises:
        CheckpointError: as `load_checkpoint`, the checkpoint holds another kind of model, or its
            parts do not belong together.
    """
    from .kinds import load_trained

    found = load_trained(path, "gpt", device=device)
    assert isinstance(found.model, GPT)
    return found.model, found.tokenizer


def restore_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's parameters into a model.

    Raises:
        CheckpointError: as `check_fits`.
    """
    check_fits(model, checkpoint)
    model.load_state_dict(dict(checkpoint.model))


def check_fits(model: nn.Module, checkpoint: Checkpoint) -> None:
    """A checkpoint's parameters are those of this model.

    Raises:
        CheckpointError: names or shapes differ: the checkpoint is of another configuration.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{checkpoint.source} is of another configuration: {name} has shape "
                f"{found.get(name, 'none')}, the model needs {wanted.get(name, 'none')}"
            )


def check_build(build: Callable[[], nn.Module], checkpoint: Checkpoint) -> None:
    """As `check_fits`, for a model that is not built yet: its sizes may be too large to be.

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


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Folder of a run's newest checkpoint, or None."""
    return max(_checkpoints(Path(run_dir)), key=_step_of, default=None)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or _FOLDER.fullmatch(path.name):
        found: Path | None = path if path.is_dir() else None
    else:
        found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def _serialise(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Contents of the files by name, the manifest last."""
    torch_format = import_extra("safetensors.torch", "a checkpoint")
    contents = {
        MODEL: torch_format.save(_plain(checkpoint.model)),
        TRAINING: torch_format.save(_plain(checkpoint.training)),
        TOKENIZER: checkpoint.tokenizer.to_json().encode("utf-8"),
    }
    manifest = write_manifest(checkpoint.step, checkpoint.config, checkpoint.state, contents)
    return {**contents, MANIFEST: manifest}


def _write_error(run_dir: Path, final: Path, error: OSError) -> CheckpointError:
    kept, cause = latest_checkpoint(run_dir), error.strerror or error
    if kept == final:
        return CheckpointError(f"checkpoint {final} may not survive a power cut: {cause}")
    state = f"{kept} is kept" if kept else "there is no earlier one"
    return CheckpointError(f"cannot write checkpoint {final}: {cause}; {state}")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the format takes them: on the CPU, and each with memory of its own."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        # A parameter under two names, such as a token embedding that two sides share.
        plain[name] = own.clone() if own.data_ptr() in seen else own
        seen.add(own.data_ptr())
    return plain


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Makes names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        return []
    return [path for path in run_dir.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]


def _step_of(folder: Path) -> int:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _remove(folder: Path) -> None:
    """Removes a checkpoint; it loses its name first, so that no half of it can be taken for one."""
    doomed = folder.with_name(f"{_REMOVING}{folder.name}")
    try:
        os.rename(folder, doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(run_dir: Path) -> None:
    for path in run_dir.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)
