"""Checkpoint folders: the manifest checkpoint.json, and atomic writes.

checkpoint.json may be damaged or malicious. So the type of every field is checked, and no file name
may leave the checkpoint's folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files.replace import replacing
from ..models.fields import check_type

MODEL, TRAINING, TOKENIZER = "model.safetensors", "training.safetensors", "tokenizer.json"
MANIFEST = "checkpoint.json"
# Version 2 has shards in place of MODEL and TRAINING.
_FORMAT, _VERSION, _SHARDED_VERSION = "fastattn-checkpoint", 1, 2
_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"
# File names of torch.distributed.checkpoint for rank 0, 1, ...: 1 = the model's tensors, 2 = the
# others.
_SHARD = re.compile(r"shard-(\d{5,})-model-0000([12])-of-00002\.safetensors")

_FIELDS: Mapping[str, Any] = {"step": int, "config": Mapping, "state": Mapping, "files": Mapping}
_CONFIG: Mapping[str, Any] = {"kind": str, "model": Mapping, "training": Mapping, "data": Mapping}
_DATA: Mapping[str, Any] = {"fingerprint": str, "tags": tuple[str, ...], "python": bool}
_STATE: Mapping[str, Any] = {
    "finished": bool,
    "validation_loss": float | None,
    "loss_count": int,
    "scaler": Mapping,
    "scores": Mapping,
    "imported": str,
}
_ENTRY: Mapping[str, Any] = {"bytes": int, "sha256": str}


class CheckpointError(OSError):
    """A checkpoint cannot be written or read, or belongs to another run."""


@dataclass(frozen=True)
class Manifest:
    """The fields of a checkpoint.json; step, config, state: as in `Checkpoint`.

    files: size in bytes and SHA-256, in hexadecimal, of each other file.
    """

    folder: Path
    step: int
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def sharded(self) -> bool:
        """Whether it is a sharded checkpoint."""
        return MODEL not in self.files

    @property
    def model_files(self) -> list[str]:
        """Names of the files with the model's tensors."""
        return self._shards("1") if self.sharded else [MODEL]

    @property
    def training_files(self) -> list[str]:
        """Names of the files with the other tensors."""
        return self._shards("2") if self.sharded else [TRAINING]

    def _shards(self, number: str) -> list[str]:
        matches = {name: _SHARD.fullmatch(name) for name in self.files}
        return sorted(name for name, match in matches.items() if match and match[2] == number)

    def check(self, name: str, *, content: bool = True) -> None:
        """Check a file against the manifest, without holding it in memory.

        content: compare the digest as well as the size.
        """
        path, entry = file_in(self.folder, name), self.files[name]
        try:
            size = path.stat().st_size
            digest = _digest(path) if content and size == entry["bytes"] else entry["sha256"]
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        self._compare(path, entry, size, digest)

    def read(self, name: str) -> bytes:
        """A file's content; CheckpointError if it is unreadable, or differs from the manifest."""
        path, entry = file_in(self.folder, name), self.files[name]
        content = read_bytes(path)
        self._compare(path, entry, len(content), hashlib.sha256(content).hexdigest())
        return content

    @staticmethod
    def _compare(path: Path, entry: Mapping[str, Any], size: int, digest: str) -> None:
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{path} is truncated or changed: it has {size} bytes, "
                f"its checkpoint was written with {entry['bytes']}"
            )
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} is corrupt: its SHA-256 differs from the index's")


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: it is unreadable, of another format, or a field is missing or of a wrong
            type; the message names the field.
    """
    path = file_in(folder, MANIFEST)
    fields = read_json(path)
    if fields.get("format") != _FORMAT:
        written = fields.get("format")
        raise CheckpointError(f"{path} is not a checkpoint of fastattn: its format is {written!r}")
    version = fields.get("version")
    if version not in (_VERSION, _SHARDED_VERSION) or isinstance(version, bool):
        raise CheckpointError(
            f"checkpoint {folder} has format version {version!r}, this fastattn reads {_VERSION} "
            f"and {_SHARDED_VERSION}"
        )
    if missing := [key for key in _FIELDS if key not in fields]:
        raise CheckpointError(f"{path} is corrupt: it has no {missing[0]!r}")
    try:
        _check_fields(fields)
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    files = fields["files"]
    wanted = [MODEL, TRAINING, TOKENIZER] if version == _VERSION else [TOKENIZER]
    if missing := [name for name in wanted if name not in files]:
        raise CheckpointError(f"{path} is corrupt: files has no entry {missing[0]!r}")
    for name in files:
        if name not in wanted and (version == _VERSION or not _SHARD.fullmatch(name)):
            raise CheckpointError(
                f"{path} is corrupt: files names {name!r}, which is no file of a checkpoint"
            )
    return Manifest(folder, *(fields[name] for name in _FIELDS))


def write_manifest(
    step: int,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Write the manifest; files: from `entry_of` or `entry_of_file`."""
    version = _VERSION if MODEL in files else _SHARDED_VERSION
    values: tuple[Any, ...] = (step, config, state, files)
    fields = {"format": _FORMAT, "version": version, **dict(zip(_FIELDS, values, strict=True))}
    return json.dumps(fields, indent=2).encode("utf-8")


def entry_of(content: bytes) -> dict[str, Any]:
    """Manifest entry of a file with this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def entry_of_file(path: Path) -> dict[str, Any]:
    """`entry_of` for a file that may not fit in memory."""
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file that holds an object."""
    try:
        fields = json.loads(read_bytes(path))
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds no fields")
    return fields


def read_bytes(path: Path) -> bytes:
    """A file's content."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def file_in(folder: Path, name: str, *others: Path) -> Path:
    """The path of a plain file in a folder; rejects names that leave the folder.

    Args:
        folder: of the file.
        name: without a folder, by the rules of any system.
        others: further folders that a link may lead to.

    Raises:
        CheckpointError: the name leads to another folder or to no plain file.
    """
    path = folder / name
    if not name.strip(".") or any(sign in name for sign in "/\\:\0"):
        raise CheckpointError(
            f"{folder} has to hold {name!r}, which names a file of another folder"
        )
    try:
        target = path.resolve()
        homes = [home.resolve() for home in (folder, *others)]
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path} is a link to a file of another folder: {target}")
    if target.exists() and not target.is_file():
        raise CheckpointError(f"cannot read {path}: it is no file")
    return path


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError on a value of a wrong type or out of range."""
    _check_types("", fields, _FIELDS)
    _check_at_least_0("step", fields["step"])
    config, state, files = fields["config"], fields["state"], fields["files"]
    _check_types("config.", config, _CONFIG)
    _check_types("config.data.", config.get("data", {}), _DATA)
    _check_types("state.", state, _STATE)
    _check_at_least_0("state.loss_count", state.get("loss_count", 0))
    for name, entry in files.items():
        check_type(f"files.{name}", entry, Mapping)
        for key, kind in _ENTRY.items():
            check_type(f"files.{name}.{key}", entry.get(key), kind)
        _check_at_least_0(f"files.{name}.bytes", entry["bytes"])
        if not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            raise ValueError(f"files.{name}.sha256 must be 64 hexadecimal digits")


def _check_types(part: str, fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in fields:
            check_type(part + name, fields[name], kind)


def _check_at_least_0(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / f"step-{step:08d}"


def writing_path(final: Path) -> Path:
    """Temporary folder of an unfinished checkpoint."""
    return final.with_name(f"{_WRITING}{final.name}")


def begin(final: Path) -> None:
    """Make the temporary folder of a checkpoint, after removing a killed write's.

    Raises:
        CheckpointError: the run's folder holds a checkpoint of this step or a later one.
    """
    newest = latest_checkpoint(final.parent)
    if newest is not None and int(newest.name[5:]) >= int(final.name[5:]):
        raise CheckpointError(
            f"{final.parent} holds {newest.name} already, so {final.name} is not written there: "
            "choose another folder"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in final.parent.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)
    writing_path(final).mkdir()


def publish(final: Path, contents: Mapping[str, bytes]) -> None:
    """Write the last files of a checkpoint, rename it, and remove the older ones."""
    run_dir, temporary = final.parent, writing_path(final)
    older = _checkpoints(run_dir)
    for name, content in contents.items():
        with replacing(temporary / name, "wb") as file:
            file.write(content)
    _flush_folder(temporary)
    os.rename(temporary, final)
    _flush_folder(run_dir)
    for folder in older:
        _remove(folder)


def discard(final: Path) -> None:
    """Remove the temporary folder of a failed write."""
    shutil.rmtree(writing_path(final), ignore_errors=True)


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Folder of a run's newest checkpoint, or None."""
    return max(_checkpoints(Path(run_dir)), key=lambda x: int(x.name[5:]), default=None)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at a path: the folder itself, or the newest of a run's folder."""
    path = Path(path)
    if (path / MANIFEST).exists() or _FOLDER.fullmatch(path.name):
        folder: Path | None = path if path.is_dir() else None
    else:
        folder = latest_checkpoint(path)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return folder


def write_error(final: Path, error: OSError, by: str = "") -> CheckpointError:
    """The error of a failed write, with the checkpoint that is left; by: the rank."""
    if isinstance(error, CheckpointError):
        return error
    kept, cause = latest_checkpoint(final.parent), f"{by}{error.strerror or error}"
    if kept == final and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return CheckpointError(f"another run has written checkpoint {final} meanwhile")
    if kept == final:
        return CheckpointError(f"checkpoint {final} may not survive a power cut: {cause}")
    state = f"{kept} is kept" if kept else "there is no earlier one"
    return CheckpointError(f"cannot write checkpoint {final}: {cause}; {state}")


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with its own memory, as safetensors requires.

    A parameter may have two names, such as a tied token embedding.
    """
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        held = local(tensor)
        shared = held.data_ptr() in seen and held.numel() > 0
        copies[name] = tensor.detach().clone() if shared else tensor.detach()
        seen.add(held.data_ptr())
    return copies


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor, all of it unless it is a DTensor."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def _flush_folder(folder: Path) -> None:
    """Flush a folder, so that its names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        return []
    return [path for path in run_dir.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]


def _remove(folder: Path) -> None:
    """Remove a checkpoint, renamed first, so that half of it never looks complete."""
    doomed = folder.with_name(f"{_REMOVING}{folder.name}")
    try:
        os.rename(folder, doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)
