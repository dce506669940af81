"""Functions that other processes run, named by strings."""

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_job(job: str) -> Callable[..., Any]:
    """The function of a name.

    Args:
        job: "package.module:function", or "/path/to/file.py:function" for test files, which cannot
            be imported by name.

    Raises:
        ValueError: the name has no colon.
        ImportError, AttributeError: there is no such module, file or function.
    """
    module, separator, name = job.rpartition(":")
    if not separator:
        raise ValueError(f'job must be "module:function" or "file.py:function", got {job!r}')
    imported = _import_file(module) if module.endswith(".py") else importlib.import_module(module)
    function: Callable[..., Any] = getattr(imported, name)
    return function


def _import_file(path: str) -> ModuleType:
    """Import a file that no package holds, once a process."""
    # The name is part of the key of Triton's disk cache: the same in every process.
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
