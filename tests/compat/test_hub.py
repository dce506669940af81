"""The folder for Hugging Face's kernels: its files, and what a loader finds in them."""

import importlib.util
import json

import pytest
import torch

from fastattn.compat import flash_attn, hub


@pytest.mark.parametrize("backend", ["cuda", "rocm", "cpu"])
def test_a_variant_loads_by_its_files(backend, tmp_path):
    """Loaded as kernels does: the package of the folder, under the id of its metadata."""
    assert len(hub.write(tmp_path)) == 2 * len(hub.BACKENDS)
    variant = tmp_path / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    wanted = {"id", "name", "version", "license", "python-depends", "backend"}
    assert set(metadata) == wanted
    assert metadata["backend"] == {"type": backend}
    assert metadata["id"].isidentifier()
    spec = importlib.util.spec_from_file_location(metadata["id"], variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(flash_attn.__all__) - set(module.__all__) == {"install", "uninstall"}
    q = torch.randn(1, 5, 2, 16)
    wanted = flash_attn.flash_attn_func(q, q, q, causal=True)
    assert torch.equal(module.flash_attn_func(q, q, q, causal=True), wanted)


def test_the_command_names_its_files(tmp_path, capsys):
    assert hub.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(path) for path in hub.write(tmp_path)]


@pytest.mark.parametrize("link", ["build", "build/torch-cuda", "build/torch-cuda/__init__.py"])
def test_nothing_is_written_through_a_link(link, tmp_path, capsys):
    theirs, path = tmp_path / "theirs", tmp_path / "out" / link
    path.parent.mkdir(parents=True)
    theirs.touch() if link.endswith("py") else theirs.mkdir()
    path.symlink_to(theirs)
    if theirs.is_file():
        hub.write(tmp_path / "out")
        assert theirs.read_bytes() == b"" and not path.is_symlink()
        return
    with pytest.raises(SystemExit, match="2"):
        hub.main([str(tmp_path / "out")])
    assert f"{path} is a link" in capsys.readouterr().err and not list(theirs.iterdir())
