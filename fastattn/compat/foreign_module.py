"""Modules under the name of another package, for code that imports that package by its name."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# By package: what stood in sys.modules before, None = nothing.
_before: dict[str, dict[str, ModuleType | None]] = {}


def install(package: str, modules: dict[str, ModuleType]) -> None:
    """Let `import package` and `import package.name` find these modules' public names.

    Args:
        package: top-level name.
        modules: by name inside the package, "" = the package itself.
    """
    if package in _before:
        return
    names = [name for name in sys.modules if name == package or name.startswith(package + ".")]
    put_aside: dict[str, ModuleType | None] = {name: sys.modules.pop(name) for name in names}
    made = {}
    for name, source in modules.items():
        full = f"{package}.{name}" if name else package
        made[full] = _copy(full, source, is_package=not name)
        put_aside.setdefault(full, None)
    for full, module in made.items():
        sys.modules[full] = module
        if full != package:
            setattr(made[package], full.rpartition(".")[2], module)
    _before[package] = put_aside


def uninstall(package: str) -> None:
    """Put back what was there before `install`."""
    for name, module in _before.pop(package, {}).items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def _copy(name: str, source: ModuleType, *, is_package: bool) -> ModuleType:
    """A module of the public names of another; `importlib.util.find_spec` finds it too."""
    module = ModuleType(name, source.__doc__)
    public = {key: x for key, x in vars(source).items() if not key.startswith("_")}
    vars(module).update(public)
    if hasattr(source, "__version__"):
        module.__version__ = source.__version__  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    return module
