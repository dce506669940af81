"""Whose code an import would run: that of the checkout of the tests, or another's."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from layout_rules import PACKAGES


def package_folder(name: str) -> Path | None:
    """The folder that a package would be imported from; nothing is imported."""
    folders: Sequence[str] | None = None
    parts = name.split(".")
    for i in range(len(parts)):
        inner = ".".join(parts[: i + 1])
        specs = (finder.find_spec(inner, folders) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(next(iter(folders))).resolve() if folders else None


def foreign(checkout: Path) -> Iterator[str]:
    """Lines about packages that do not come from a checkout."""
    for home, name in PACKAGES.items():
        actual = package_folder(name)
        if actual != (checkout / home).resolve():
            yield f"{name} comes from {actual or 'nowhere'}, not from {checkout / home}"
