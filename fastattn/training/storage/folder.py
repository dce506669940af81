"""A run's folder of checkpoints: each is written whole or not at all; the newest one is found."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from .manifest import MANIFEST, CheckpointError

_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"


def write(run_dir: Path, step: int, contents: Callable[[], Mapping[str, bytes]]) -> Path:
    """See `checkpoint.save_checkpoint`; contents: makes those of the files, by name."""
    final = checkpoint_path(run_dir, step)
    if final.exists():
        return final
    try:
        begin(final)
        publish(final, contents())
    except OSError as error:
        discard(final)
        raise write_error(final, error) from None
    return final


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / f"step-{step:08d}"


def writing_path(final: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return final.with_name(f"{_WRITING}{final.name}")


def begin(final: Path) -> None:
    """Makes the folder that a checkpoint is written in, and removes what a kill has left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    writing_path(final).mkdir()


def publish(final: Path, contents: Mapping[str, bytes]) -> None:
    """Adds the last files of a checkpoint, names it, and removes the older ones."""
    run_dir, temporary = final.parent, writing_path(final)
    older = _checkpoints(run_dir)
    for name, content in contents.items():
        _write_durably(temporary / name, content)
    _flush_folder(temporary)
    os.rename(temporary, final)
    _flush_folder(run_dir)
    for folder in older:
        _remove(folder)


def discard(final: Path) -> None:
    """Removes what there is of a checkpoint that cannot be written."""
    shutil.rmtree(writing_path(final), ignore_errors=True)


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Folder of a run's newest checkpoint, or None."""
    return max(_checkpoints(Path(run_dir)), key=lambda x: int(x.name[5:]), default=None)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in a run's folder."""
    path = Path(path)
    if (path / MANIFEST).exists() or _FOLDER.fullmatch(path.name):
        found: Path | None = path if path.is_dir() else None
    else:
        found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def write_error(final: Path, error: OSError, by: str = "") -> CheckpointError:
    """The error of a checkpoint that could not be written, with what is left; by: whom it met."""
    kept, cause = latest_checkpoint(final.parent), f"{by}{error.strerror or error}"
    if kept == final and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return CheckpointError(f"another run has written checkpoint {final} meanwhile")
    if kept == final:
        return CheckpointError(f"checkpoint {final} may not survive a power cut: {cause}")
    state = f"{kept} is kept" if kept else "there is no earlier one"
    return CheckpointError(f"cannot write checkpoint {final}: {cause}; {state}")


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own, as the format asks for.

    A parameter may have two names, such as a token embedding that two sides share.
    """
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        local: Tensor = getattr(tensor, "to_local", lambda x=tensor: x)()  # of a DTensor its part
        shared = local.data_ptr() in seen and local.numel() > 0
        found[name] = tensor.detach().clone() if shared else tensor.detach()
        seen.add(local.data_ptr())
    return found


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
