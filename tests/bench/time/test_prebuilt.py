"""The archive of compiled kernels, by Triton's own cache."""

import tarfile
from io import BytesIO

import pytest
import triton
from triton.runtime.cache import FileCacheManager

from fastattn.bench.time import prebuilt

FILES = {"kernel.cubin": b"code", "kernel.json": b"{}", "kernel.ttir": b"text"}


@pytest.fixture
def folders(tmp_path):
    """Two caches, the first with a kernel and a launcher; Triton's is the second."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "built")
        kernel, launcher = FileCacheManager("a" * 64), FileCacheManager("b" * 64)
        kernel.put_group("kernel.json", {n: kernel.put(x, n) for n, x in FILES.items()})
        launcher.put(b"library", "launcher.so")
        triton.knobs.cache.dir = str(tmp_path / "other" / "place")
        yield tmp_path / "built", tmp_path / "other" / "place"


def test_triton_finds_what_was_unpacked_in_another_folder(folders, tmp_path):
    built, cache = folders
    archive = tmp_path / "out" / "prebuilt.txz"
    assert prebuilt.pack(built, archive) == 2  # a kernel and a launcher
    before = prebuilt.kernels()
    assert prebuilt.unpack(archive) == {"kernel": 1}
    group = FileCacheManager("a" * 64).get_group("kernel.json")
    assert set(group) == {"kernel.cubin", "kernel.json"}  # machine code without its stages
    assert {*map(str, cache.glob("*/kernel.*"))} == {*group.values()}
    assert FileCacheManager("b" * 64).get_file("launcher.so") is not None
    line = prebuilt.compared(prebuilt.kernels(), prebuilt.kernels())
    assert line == "1 kernels from the archive; compiled in this run: none"
    assert prebuilt.compared(None, before).endswith("no archive; compiled in this run: kernel 1")


@pytest.mark.parametrize("name", ["../evil.so", "a/b/c.so", "/etc/evil.so", "evil.so"])
def test_no_file_leaves_the_cache(folders, tmp_path, name):
    archive = tmp_path / "x.txz"
    with tarfile.open(archive, "w:xz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, BytesIO(b"x"))
    with pytest.raises(ValueError, match="is not a file of a cache"):
        prebuilt.unpack(archive)
    assert not folders[1].exists()
