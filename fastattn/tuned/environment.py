"""Environment of a result: GPU, driver, compilers, kernel sources."""

import hashlib
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..ops import call

_KERNELS = f"{__package__.rpartition('.')[0]}.kernels"
_SHARED = ("rules/*.py", "launch/[!ei]*.py")  # but emulation and interpreter
# Groups of kernels, and the patterns of their files. Tables of tiles are for portable kernels.
SOURCES = {
    "hopper": ("hopper/*.py", *_SHARED),
    "hopper forward": ("hopper/[!bo]*.py", "forward.py", "fp8/values.py", *_SHARED),
    "hopper backward": ("hopper/[!f]*.py", "backward*.py", *_SHARED),
    "forward": ("forward.py", *_SHARED, "launch/*.json"),
    "backward": ("backward*.py", *_SHARED, "launch/*.json"),
    "decode": ("decode/*.py", "combine.py", *_SHARED, "launch/*.json"),
    "all": ("*",),
}
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


class Environment(NamedTuple):
    """GPU, driver and versions; results hold in equal environments.

    gpu: its name, or "interpreter", which has no multiprocessors and no driver. kernels: hash of
    their sources.
    """

    gpu: str
    multiprocessors: int
    driver: str
    torch: str
    triton: str
    kernels: str

    @property
    def hash(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(json.dumps(list(self)).encode()).hexdigest()[:16]


def environment(device: torch.device | str) -> Environment:
    """Get the environment of a device: a GPU, or the CPU for the interpreter."""
    device = torch.device(device)
    gpu, multiprocessors, driver = "interpreter", 0, ""
    if device.type == "cuda" and not call.interpreting():
        properties = torch.cuda.get_device_properties(device)
        gpu, multiprocessors = properties.name, properties.multi_processor_count
        driver = _driver()
    triton = metadata.version("triton") if call.TRITON_INSTALLED else ""
    code = fingerprints()["all"]
    return Environment(gpu, multiprocessors, driver, torch.__version__, triton, code)


def numbered(device: torch.device) -> torch.device:
    """Give a device its number; without one, the current GPU's."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def difference(stored: Environment, here: Environment) -> str:
    """Name the fields in which two environments differ."""
    pairs = zip(Environment._fields, stored, here, strict=True)
    return ", ".join(f"{name} {x} instead of {y}" for name, x, y in pairs if x != y)


@cache
def _driver() -> str:
    """Read the driver's version from files: nvidia-smi is too slow for a first call."""
    for path in _DRIVERS:
        try:
            version = re.search(r"\d+(\.\d+)+", path.read_text("utf-8"))
        except OSError:
            continue
        if version is not None:
            return version[0]
    # A container may hide the files; torch knows the CUDA version that the driver supports.
    supported = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(supported() if supported is not None else torch.version.hip)


def _code(*patterns: str) -> str:
    """Hash of the files of kernels/ whose paths match one of the patterns, as `fnmatch` does."""
    digest = hashlib.sha256()
    for name, of_file in _digests().items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            digest.update(f"{name} ".encode() + of_file)
    return digest.hexdigest()[:16]


@cache
def fingerprints() -> dict[str, str]:
    """The hash of the files of each group of SOURCES."""
    return {group: _code(*patterns) for group, patterns in SOURCES.items()}


@cache
def _digests() -> dict[str, bytes]:
    """A hash of each file of the kernels' code and tiles."""
    # Line endings do not change a kernel.
    return {
        name: hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).digest()
        for name, file in sorted(_files(resources.files(_KERNELS), ""))
    }


def _files(folder: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Code and tables of an installed package, by path."""
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files(entry, f"{name}/")
        elif name.endswith((".py", ".json")):
            yield name, entry
