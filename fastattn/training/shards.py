"""Read sharded checkpoints: safetensors files written by every rank.

Each rank writes two files, with its shards of the model's tensors and of the others. Their metadata
holds the offset of each shard (torch's `HuggingFaceStorageWriter`); there is no pickle. A plain
safetensors file is read in the same way, as one shard per tensor.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .storage import CheckpointError, Manifest, file_in


class ShardReader(HuggingFaceStorageReader):
    """Reads tensors from files of a checkpoint, sharded or not."""

    def __init__(self, manifest: Manifest, names: list[str]) -> None:
        super().__init__(str(manifest.folder))
        self._manifest = manifest
        self._paths = [file_in(manifest.folder, name) for name in names]
        self.fs = _Listed(self._paths)

    def shapes(self) -> dict[str, Tensor]:
        """The tensors on the meta device, by name.

        Raises:
            CheckpointError: a file is missing or unreadable, its size differs from the manifest's,
                or a part of a tensor is missing.
        """
        for path in self._paths:
            self._manifest.check(path.name, content=False)
        folder = self._manifest.folder
        try:
            entries = self.read_metadata().state_dict_metadata
        # The Rust code raises its own exception type, the Python code any.
        except Exception as error:
            raise CheckpointError(f"checkpoint {folder} is corrupt: {error}") from None
        shapes = {}
        for name, entry in entries.items():
            assert isinstance(entry, TensorStorageMetadata)
            shapes[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            there = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if there != shapes[name].numel():
                raise CheckpointError(
                    f"checkpoint {folder} is incomplete: it has {there} of the "
                    f"{shapes[name].numel()} values of {name}"
                )
        return shapes


class _Listed(FileSystem):
    """A file system with only these files."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return list(map(str, self._paths))


def read_tensors(
    manifest: Manifest,
    names: list[str],
    tensors: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill tensors from a checkpoint with any other split.

    Args:
        manifest: of the checkpoint, sharded or not.
        names: of the files that hold them.
        tensors: by name, in the checkpoint's shapes; a DTensor takes its own part.
        group: of the ranks that call this together; None = this process reads alone.

    Raises:
        CheckpointError: a file differs from the manifest. All ranks raise it.
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

    def check() -> None:
        for name in names[rank::ranks]:
            manifest.check(name)

    agree(check, group)
    reader = ShardReader(manifest, names)
    with warnings.catch_warnings():
        # A single process reads on purpose.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise CheckpointError(f"checkpoint {manifest.folder}: rank {rank}: {cause}") from None


def agree(check: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Call a check on every rank; all ranks raise the first failing rank's error."""
    error = None
    try:
        check()
    except CheckpointError as caught:
        error = caught
    if group is None:
        errors = [error]
    else:
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group)
    for error in errors:
        if error is not None:
            raise error
