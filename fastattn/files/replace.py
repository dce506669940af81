"""Atomic replacement of a file: a reader, or a crash, sees the old content or the new one."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_SUFFIX = ".partial"


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that replaces `path` when the block ends without an error.

    It has an unused name in the same folder and follows no link. After an error it is removed. A
    killed process leaves it: see `remove_partial`.

    Args:
        path: the file to replace or to make; a link there is replaced, not followed.
        mode: "w" = UTF-8 text, "wb" = bytes.

    Raises:
        OSError: it cannot be written and flushed to the disk.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    encoding = None if "b" in mode else "utf-8"
    with temporary.open(mode.replace("w", "x"), encoding=encoding) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_partial(path: Path) -> None:
    """Remove the partial files of `path` that killed processes left; call it without writers."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}{_SUFFIX}"):
        left.unlink(missing_ok=True)
