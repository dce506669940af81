"""Build and load the dry run's two libraries; they are kept beside Triton's cache."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
# The dynamic linker gives it to whoever asks for the driver once it is loaded under this name.
_DRIVER = "libcuda.so.1"


class NoCompiler(RuntimeError):
    """This machine has no compiler for the language."""


def load_driver() -> ctypes.CDLL:
    """The stand-in for libcuda, which Triton's driver will find loaded."""
    headers = _package("triton") / "backends" / "nvidia" / "include"
    library = _built("libcuda.c", _DRIVER, "cc", ["-O1", f"-Wl,-soname,{_DRIVER}", f"-I{headers}"])
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def load_device_guard() -> None:
    """A CUDA device for torch. Before torch is imported, which does not look for one later."""
    torch = _package("torch")
    flags = ["-std=c++20", "-O0", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    flags += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    library = _built("device_guard.cpp", "libdevice_guard.so", "c++", flags)
    for runtime in sorted((torch / "lib").glob("libgomp*")):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _package(name: str) -> Path:
    """A package's folder, without importing it."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _built(source: str, name: str, compiler: str, flags: Sequence[str]) -> Path:
    command = shutil.which(compiler)
    if command is None:
        raise NoCompiler(f"{source} is built with {compiler}, which is not here")
    text = (HERE / source).read_bytes()
    key = sha256(repr((text, flags, version("torch"), version("triton"))).encode()).hexdigest()
    folder = _cache() / f"dry-run-{key[:16]}"
    library = folder / name
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            # Sources before libraries, or the linker drops what it has no use for yet.
            output = Path(made) / name
            arguments = ["-shared", "-fPIC", "-o", output, HERE / source, *flags]
            subprocess.run([command, *arguments], check=True)
            output.replace(library)
    return library


def _cache() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"
