"""Import functions by name, in processes that cannot unpickle them."""

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(function: str) -> Callable[..., Any]:
    """Import a function by its name.

    "package.module:function", or "/path/to/file.py:function" for test files, which cannot be
    imported by name. Raises ValueError without a colon, ImportError or AttributeError where there
    is none.
    """
    module, separator, name = function.rpartition(":")
    if not separator:
        raise ValueError(f'job must be "module:function" or "file.py:function", got {function!r}')
    imported = _import_file(module) if module.endswith(".py") else importlib.import_module(module)
    python: Callable[..., Any] = getattr(imported, name)
    return python


def _import_file(path: str) -> ModuleType:
    """Import a file outside any package, once a process."""
    # Triton's disk cache hashes the name, so it must be equal in every process.
    name = f"_job_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
