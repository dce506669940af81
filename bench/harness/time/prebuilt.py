"""An archive of compiled kernels and launchers, and Triton's cache, where they are unpacked."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import triton

# Machine code, its description, and the launchers' libraries: what a launch reads.
_NEEDED = (".cubin", ".json", ".so")
_GROUP = "__grp__"


def kernels() -> Counter[str]:
    """The number of compiled kernels of each name in Triton's cache."""
    return Counter(path.stem for path in _cache().glob("*/*.cubin"))


def _cache() -> Path:
    return Path(triton.knobs.cache.dir)


def pack(folder: Path, archive: Path) -> int:
    """Write a cache's kernels and launchers to an archive; return their number."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in folder.glob("*/*") if path.suffix in _NEEDED)
    with tarfile.open(archive, "w:xz") as tar:
        for path in files:
            tar.add(path, path.relative_to(folder))
    return sum(path.suffix != ".json" for path in files)


def unpack(archive: Path, folder: Path | None = None) -> Counter[str]:
    """Unpack an archive into a cache, by default Triton's; return its kernels by name."""
    folder = folder or _cache()
    names: Counter[str] = Counter()
    with tarfile.open(archive) as tar:
        for member, text in _files(tar):
            path = folder / member
            names[path.stem] += path.suffix == ".cubin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_moved(text, path.parent) if path.name.startswith(_GROUP) else text)
    return +names


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file; refuses paths that leave the folder."""
    for member in tar:
        if len(Path(member.name).parts) != 2 or ".." in member.name or not member.isfile():
            raise ValueError(f"{member.name} is not a file of a cache")
        file = tar.extractfile(member) or BytesIO()
        yield member.name, file.read()


def _moved(text: bytes, folder: Path) -> bytes:
    """A group's list, by absolute paths, of the files that were packed, for another folder."""
    group = json.loads(text)
    paths = [Path(path).name for path in group["child_paths"].values()]
    packed = [name for name in paths if name.endswith(_NEEDED)]
    group["child_paths"] = {name: str(folder / name) for name in packed}
    return json.dumps(group).encode()


def compared(unpacked: Counter[str] | None, before: Counter[str]) -> str:
    """A line about the kernels that the cache has beyond `before`: compiled since."""
    new = kernels() - before
    names = ", ".join(f"{name} {count}" for name, count in sorted(new.items())) or "none"
    found = "no archive" if unpacked is None else f"{unpacked.total()} kernels from the archive"
    return f"{found}; compiled in this run: {names}"
