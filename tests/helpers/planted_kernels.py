"""Kernels of a test file with a fault in them."""

import importlib.util
from pathlib import Path
from types import ModuleType


def planted(source: str, folder: Path, old: str, new: str) -> ModuleType:
    """The kernels of a file, up to its `descriptor`, with one text replaced, as a module."""
    text = Path(source).read_text(encoding="utf-8")
    text = text[: text.index("def descriptor(")]
    assert old in text, old
    path = folder / "kernels_with_a_fault.py"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
