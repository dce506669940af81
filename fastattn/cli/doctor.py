"""`fastattn info --doctor`: problems of this machine, with remedies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ..missing import installing

# By package: the command that installs it, and the purpose.
PACKAGES = {
    "numpy": (
        "pip install numpy",
        "Triton's interpreter, `fastattn verify` on a CPU",
    ),
    "transformers": (installing("hf"), 'attn_implementation="fastattn"'),
    "tokenizers": (installing("gpt"), "`fastattn train` with subword tokenizers"),
    "safetensors": (installing("gpt"), "checkpoints"),
    "matplotlib": (installing("gpt"), "`fastattn inspect`, and plots"),
}


class Finding(NamedTuple):
    """A line of the report. remedy: empty if there is no problem."""

    about: str
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Examine the GPU, the compiler, the caches and the packages of this machine."""
    return [*_device(), _compiler(), *_caches(), *_packages()]


def describe(findings: list[Finding]) -> list[str]:
    """Format the report: findings with their remedies, and a count of the remedies."""
    lines = []
    for finding in findings:
        lines.append(f"{'!' if finding.remedy else ' '} {finding.about}: {finding.detail}")
        if finding.remedy:
            lines.append(f"    to do: {finding.remedy}")
    count = sum(bool(finding.remedy) for finding in findings)
    return [*lines, f"{count} to do" if count else "nothing to do"]


def _device() -> Iterator[Finding]:
    import torch

    built = torch.version.cuda or torch.version.hip
    if built is None:
        remedy = "for a GPU, install torch's build for it: https://pytorch.org/get-started/locally"
        yield Finding("GPU", f"torch {torch.__version__} is built for the CPU alone", remedy)
    elif not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
        remedy = "check nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES"
        if driver is None:
            remedy = "if there is a GPU, install its driver"
        yield Finding("GPU", f"torch, built for {built}, sees none", remedy)
    else:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = properties.major, properties.minor
            old = capability < (8, 0) and torch.version.hip is None
            remedy = "below 8.0 the torch backend serves every call" if old else ""
            shown = f"{properties.name}, {properties.major}.{properties.minor}, torch for {built}"
            yield Finding(f"GPU {index}", shown, remedy)


def _compiler() -> Finding:
    """Look for a C compiler, with which Triton compiles its launcher on a GPU."""
    named = os.environ.get("CC")
    path = next(filter(None, map(shutil.which, [named] if named else ["gcc", "clang"])), None)
    if path:
        return Finding("C compiler", path)
    remedy = "on a GPU, install gcc (Debian, Ubuntu: apt install gcc), or set CC to a compiler"
    return Finding("C compiler", f"CC={named} is no program" if named else "none", remedy)


def _caches() -> Iterator[Finding]:
    from ..tuned.store import CACHE_DIR, cache_folder

    triton = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    folders = {"kernels": (triton, "TRITON_CACHE_DIR"), "results": (cache_folder(), CACHE_DIR)}
    for name, (folder, variable) in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shown = f"{folder}, {sum(sizes) / 2**20:.1f} MiB"
        if os.access(there, os.W_OK):
            yield Finding(f"cache of {name}", shown)
        else:
            remedy = f"set {variable} to a folder that can be written"
            yield Finding(f"cache of {name}", f"{there} cannot be written", remedy)


def _packages() -> Iterator[Finding]:
    for package, (command, purpose) in PACKAGES.items():
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", f"for {purpose}: {command}")
