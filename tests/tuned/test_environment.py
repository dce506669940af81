"""Environment that findings hold for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn.ops import call
from fastattn.tuned import environment as module
from fastattn.tuned.environment import Environment, environment

HERE = Environment("A GPU", 4, "550.1", "2.13.0", "3.7.1", "0" * 16)


def test_hash_has_every_field_in_it() -> None:
    others = [
        HERE._replace(gpu="B GPU"), HERE._replace(multiprocessors=5),
        HERE._replace(driver="550.2"), HERE._replace(torch="2.12.0"),
        HERE._replace(triton="3.6.0"), HERE._replace(kernels="1" * 16),
    ]  # fmt: skip
    assert len({one.hash for one in (HERE, *others)}) == 7


def test_gpu_and_driver_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr(module, "_DRIVERS", (tmp_path / "absent", driver))
    monkeypatch.setattr(call, "interpreting", lambda: False)
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module._driver.cache_clear()
    try:
        actual = environment("cuda:0")
    finally:
        module._driver.cache_clear()
    assert actual[:3] == ("NVIDIA H200", 132, "550.54.15")
    assert actual.kernels == module.fingerprints()["all"]


@pytest.mark.parametrize("name", ["forward.py", "rules/mask.py", "launch/tuning/sm_90.json"])
def test_kernels_are_known_by_their_sources(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel, a rule of it, or a tile that it is launched with."""
    package = tmp_path / "kernels_like"
    (package / Path(name).parent).mkdir(parents=True)
    (package / "__init__.py").touch()
    file = package / name
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_KERNELS", package.name)
    hashes = []
    for text in (b"one\n", b"two\n", b"two\r\n"):
        file.write_bytes(text)
        module._digests.cache_clear()
        hashes.append(module.fingerprints.__wrapped__()["all"])
    module._digests.cache_clear()
    sys.modules.pop(package.name, None)
    assert hashes[0] != hashes[1] == hashes[2]
