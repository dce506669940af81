"""Results on disk: a folder per environment, a file per kind.

A killed process leaves the old or the new file; concurrent writers lose nothing. Files that cannot
be read or written are ignored with one warning.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..files.lock import locked
from ..files.replace import remove_partial
from . import findings
from .environment import Environment, difference
from .findings import Findings, Record, Unreadable

CACHE_DIR = "FASTATTN_CACHE_DIR"
_warned: set[str] = set()


class Store:
    """Results of one environment, in a folder; default: in `cache_folder()`."""

    def __init__(self, environment: Environment, folder: str | Path | None = None) -> None:
        self.environment = environment
        home = cache_folder() if folder is None else Path(folder)
        self.folder = home / f"v{findings.FORMAT}" / environment.hash

    def path(self, kind: str) -> Path:
        """Get the file of a kind of results, a key of `findings.KEYS`."""
        return self.folder / f"{findings.check_kind(kind)}.json"

    def read(self, kind: str) -> list[Record]:
        """Read the rows of a kind; none if there is no readable file."""
        path = self.path(kind)
        try:
            return self._rows(kind)
        except (OSError, Unreadable) as error:
            warn_once(f"fastattn ignores {path}: {error}")
            return []

    def put(self, kind: str, *rows: Mapping[str, Any]) -> bool:
        """Store rows; each replaces the row with the same key.

        Returns:
            Whether they are on disk; if not, warns.

        Raises:
            ValueError: there is no such kind, or a row lacks a field of its key.
        """
        path = self.path(kind)
        dated = [findings.dated(kind, row) for row in rows]

        def put() -> None:
            try:
                kept = self._rows(kind)
            except Unreadable as error:
                kept = []
                # To an unused name, so that it can be examined.
                count = len(list(path.parent.glob(f"{path.stem}.damaged-*")))
                aside = path.with_name(f"{path.stem}.damaged-{count}.json")
                path.rename(aside)
                warn_once(f"fastattn moved {path} to {aside.name}: {error}")
            remove_partial(path)
            merged = findings.merged(kind, *kept, *dated)
            findings.write(path, Findings(self.environment, {kind: merged}))

        return self._locked(put)

    def clear(self, kind: str) -> bool:
        """Delete the rows of a kind; return whether that succeeded, as `put` does."""
        path = self.path(kind)
        return not path.exists() or self._locked(lambda: path.unlink(missing_ok=True))

    def export(self, path: str | Path) -> None:
        """Write all results to one file, for `import_` or FASTATTN_TUNED on another machine."""
        rows = {kind: self.read(kind) for kind in findings.KEYS}
        findings.write(Path(path), Findings(self.environment, rows))

    def import_(self, path: str | Path) -> int:
        """Store the results of a file that `export` wrote; return their number, see `put`.

        Raises:
            OSError, ValueError: it cannot be read, is no such file or of a different environment.
        """
        saved = findings.read(Path(path))
        if saved.environment != self.environment:
            other = difference(saved.environment, self.environment)
            raise ValueError(f"{path} has a different environment: {other}")
        return sum(len(rows) for kind, rows in saved.rows.items() if rows and self.put(kind, *rows))

    def _rows(self, kind: str) -> list[Record]:
        try:
            stored = findings.read(self.path(kind))
        except FileNotFoundError:
            return []
        if stored.environment != self.environment:
            raise Unreadable("its environment is not that of its folder")
        return stored.rows.get(kind, [])

    def _locked(self, change: Callable[[], None]) -> bool:
        """Change the folder under its lock; return whether that succeeded."""
        try:
            with locked(self.folder / "lock", wait=True):
                change()
        except OSError as error:
            warn_once(f"fastattn cannot store results: {error}; set {CACHE_DIR}")
            return False
        return True


def cache_folder() -> Path:
    """Get $FASTATTN_CACHE_DIR, else the platform's folder for a user's caches."""
    if folder := os.environ.get(CACHE_DIR):
        return Path(folder)
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:  # a copy for Hugging Face's kernels has no dependencies
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(home, "fastattn")
    return user_cache_path("fastattn")


def warn_once(message: str) -> None:
    """Warn once about stored results."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=3)
