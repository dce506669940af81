"""Write a kernel folder for Hugging Face's package kernels, which needs no installed fastattn.

    python -m fastattn.compat.hub OUT
    LOCAL_KERNELS="me/fastattn=OUT" python program.py

    from kernels import get_kernel, get_local_kernel

Each backend of torch has a copy of the files that attention, decoding and flash-attn's functions
reach by their imports. These are relative and operators are named after the package: a copy works
beside other copies and beside fastattn.
"""

import argparse
import ast
import base64
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import resolve_name
from pathlib import Path

from . import flash_attn

BACKENDS = ("cuda", "rocm", "cpu")
# Without `install` and `uninstall`, which are no kernels.
FUNCTIONS = tuple(name for name in flash_attn.__all__ if name.startswith("flash_attn"))
_ROOT = __package__.partition(".")[0]
_SERVED = ("functional.fused_attention", "functional.decode", "compat.flash_attn")
# A kernel's version of the hub grows when calls of the old one fail.
_METADATA = {"name": _ROOT, "version": 1, "license": "Apache-2.0", "python-depends": []}


def write(folder: str | Path) -> list[Path]:
    """Write and return build/torch-cuda, build/torch-rocm and build/torch-cpu in `folder`.

    Raises:
        FileExistsError: one of them exists, and is left as it is.
        OSError: they cannot be written.
    """
    files = contents()
    digests = {name: hashlib.sha256(text).digest() for name, text in files.items()}
    version = hashlib.sha256(b"".join(digests.values())).hexdigest()[:8]
    told = {name: base64.b64encode(digest).decode() for name, digest in digests.items()}
    variants = {backend: Path(folder) / "build" / f"torch-{backend}" for backend in BACKENDS}
    for variant in variants.values():
        variant.mkdir(parents=True)
    for backend, variant in variants.items():
        for name, text in files.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_bytes(text)
        # The id is the module's name in sys.modules and that of its operators in torch.ops.
        about = {"id": f"{_ROOT}_{backend}_{version}", **_METADATA, "backend": {"type": backend}}
        about["digest"] = {"algorithm": "sha256", "files": told}
        (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    return list(variants.values())


def contents() -> dict[str, bytes]:
    """Collect the files of a variant, without metadata.json, by path.

    Raises:
        ValueError: a file imports fastattn by its name, or a name of fastattn/__init__.py.
    """
    sources = modules()
    reached, waiting = {_ROOT}, [f"{_ROOT}.{name}" for name in _SERVED]
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += [name.rpartition(".")[0], *_imported(name, sources[name], sources)]
    files = {"__init__.py": _init(sources[_ROOT], reached).encode()}
    for name in sorted(reached - {_ROOT}):
        path = sources[name]
        place = Path(*name.split(".")[1:])
        if path.name != "__init__.py":
            files[f"{place.as_posix()}.py"] = path.read_bytes()
            continue
        for file in (
            path,
            *sorted(path.parent.glob("*.json")),
            *sorted(path.parent.glob("*/*.json")),
        ):
            inner = file.relative_to(path.parent)
            if f"{name}.{inner.parts[0]}" not in sources:
                files[(place / inner).as_posix()] = file.read_bytes()
    return files


def modules() -> dict[str, Path]:
    """Find the file of every module of fastattn; kernels may be in another folder."""
    found = {}
    for package in (_ROOT, f"{_ROOT}.kernels"):
        folder = Path(str(resources.files(package)))
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def _imported(name: str, path: Path, sources: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of fastattn that a module imports, for type checkers too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            members = [f"{base}.{alias.name}" for alias in node.names]
            targets = [member if member in sources else base for member in members]
        else:
            continue
        ours = [target for target in targets if target.partition(".")[0] == _ROOT]
        if ours and (not getattr(node, "level", 0) or _ROOT in ours):
            raise ValueError(f"{path}:{node.lineno} must import modules relatively, got {ours[0]}")
        yield from (target for target in ours if target in sources)  # else a stub


def _init(path: Path, reached: set[str]) -> str:
    """Write a variant's __init__.py: the imports of fastattn's from the reached modules."""
    lines, names = [], list(FUNCTIONS)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and f"{_ROOT}.{node.module}" in reached:
            lines.append(ast.unparse(node))
            names += [alias.asname or alias.name for alias in node.names]
    lines.append(f"from .compat.flash_attn import {', '.join(FUNCTIONS)}")
    about = f'"""Exact fused attention in Triton: fastattn {sys.modules[_ROOT].__version__}."""'
    return "\n".join((about, "", *lines, "", f"__all__ = {sorted(names)!r}", ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder named on the command line, and print its variants."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.compat.hub",
        description="Write a folder that Hugging Face's kernels loads as a kernel: attention, "
        "decoding and flash-attn's functions, without fastattn.",
    )
    parser.add_argument("folder", metavar="OUT", help="where the folder build goes")
    if not (folder := parser.parse_args(argv).folder):
        parser.error("OUT must not be empty (.: the current folder)")
    try:
        written = write(folder)
    except OSError as error:
        parser.error(str(error))
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
