"""Make modules importable under the name of another package, with its metadata."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

# By package: the former sys.modules entries, None = none.
_before: dict[str, dict[str, ModuleType | None]] = {}


def install(
    package: str,
    modules: dict[str, tuple[ModuleType, ...]],
    version: str | None = None,
    instead: dict[str, str] | None = None,
    distribution: str | None = None,
) -> None:
    """Make `import package` and `import package.name` find these modules' public names.

    Args:
        package: top-level name.
        modules: by dotted name inside the package ("" = the package itself), the modules whose
            `__all__` it exports. Unnamed parent packages are empty.
        version: of the distribution that `importlib.metadata` reports; None = no distribution.
        instead: by name inside the package, replacements for missing modules ("" = all others),
            named by their import error if there is a version.
        distribution: its name; None = the package's.
    """
    if package in _before:
        return
    names = [name for name in sys.modules if name == package or name.startswith(package + ".")]
    put_aside: dict[str, ModuleType | None] = {name: sys.modules.pop(name) for name in names}
    paths = {package: modules.get("", ())}
    for name in sorted(modules):
        parts = name.split(".") if name else []
        for depth in range(1, len(parts) + 1):
            inside = ".".join(parts[:depth])
            paths[f"{package}.{inside}"] = modules.get(inside, ())
    for full, sources in paths.items():
        is_package = any(other.startswith(full + ".") for other in paths)
        sys.modules[full] = _made(full, sources, is_package=is_package)
        put_aside.setdefault(full, None)
        parent, _, leaf = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, sys.modules[full])
    _before[package] = put_aside
    if version is not None:
        # Before the finder of installed distributions.
        sys.meta_path.insert(0, _Metadata(package, version, instead or {}, distribution))


def uninstall(package: str) -> None:
    """Undo `install`."""
    for name, module in _before.pop(package, {}).items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    for finder in list(sys.meta_path):
        if isinstance(finder, _Metadata) and finder.package == package:
            sys.meta_path.remove(finder)


def _made(name: str, sources: tuple[ModuleType, ...], *, is_package: bool) -> ModuleType:
    """A module with other modules' names, known to `importlib.util.find_spec`."""
    module = ModuleType(name, sources[0].__doc__ if sources else None)
    for source in sources:
        vars(module).update({key: getattr(source, key) for key in source.__all__})
        if hasattr(source, "__version__"):
            module.__version__ = source.__version__  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    return module


class _Metadata(importlib.metadata.DistributionFinder):
    """Finder of one distribution's metadata; its modules are in sys.modules."""

    def __init__(
        self, package: str, version: str, instead: dict[str, str], name: str | None
    ) -> None:
        self.package, self.version, self.instead = package, version, instead
        self.name = name or package

    def find_spec(self, name: str, *_: Any) -> None:
        inside = name.removeprefix(f"{self.package}.")
        if inside == name or not self.instead:
            return
        parts = inside.split(".")
        paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        what = next(self.instead[path] for path in paths if path in self.instead)
        raise ModuleNotFoundError(
            f"{name} is not among what fastattn installs as {self.package}; use {what}", name=name
        )

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context is None else context.name
        if wanted is None or _normalised(wanted) == _normalised(self.name):
            yield _Distribution(self.name, self.version, self.package)


class _Distribution(importlib.metadata.Distribution):
    """A distribution without files."""

    def __init__(self, name: str, version: str, package: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return PurePosixPath(path)


def _normalised(name: str) -> str:
    """Distribution name in canonical form: flash_attn and flash-attn are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()
