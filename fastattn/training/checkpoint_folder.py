"""A run's folder of checkpoints: each is written whole or not at all; the newest one is found."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from .manifest import MANIFEST, CheckpointError

_FOLDER = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"


def write(run_dir: Path, step: int, contents: Callable[[], Mapping[str, bytes]]) -> Path:
    """See `checkpoint.save_checkpoint`; contents: makes those of the files, by name."""
    final = run_dir / f"step-{step:08d}"
    if final.exists():
        return final
    temporary = run_dir / f"{_WRITING}{final.name}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(run_dir)
        older = _checkpoints(run_dir)
        temporary.mkdir()
        for name, content in contents().items():
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


def _write_error(run_dir: Path, final: Path, error: OSError) -> CheckpointError:
    kept, cause = latest_checkpoint(run_dir), error.strerror or error
    if kept == final:
        return CheckpointError(f"checkpoint {final} may not survive a power cut: {cause}")
    state = f"{kept} is kept" if kept else "there is no earlier one"
    return CheckpointError(f"cannot write checkpoint {final}: {cause}; {state}")


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
