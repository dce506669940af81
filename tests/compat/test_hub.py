"""The folder for Hugging Face's kernels: its files, and what it computes without fastattn."""

import ast
import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn.compat import flash_attn, hub

TOOLS = Path(__file__).parents[1] / "tools"
# What a process of a kernel has: torch and triton, whose interpreter is of numpy.
ABSENT = ["fastattn", "platformdirs", "einops", "numpy"]
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
sys.path.append({tools!r})
import kernel_folder
kernel_folder.main()
"""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return hub.write(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("interpreted", [False, True], ids=["torch", "interpreter"])
def test_the_folder_computes_without_fastattn(interpreted, variants, tmp_path):
    """Two variants in one process, against torch's formula, with gradients."""
    program = PROGRAM.format(absent=ABSENT[: 3 if interpreted else None], tools=str(TOOLS))
    command = [sys.executable, "-c", program, *map(str, variants[: 1 if interpreted else 2])]
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_metadata_is_what_kernels_reads(variants):
    assert [path.name for path in variants] == ["torch-cuda", "torch-rocm", "torch-cpu"]
    told = [json.loads((path / "metadata.json").read_text()) for path in variants]
    for variant, metadata in zip(variants, told, strict=True):
        wanted = {"id", "name", "version", "license", "python-depends", "backend", "digest"}
        assert set(metadata) == wanted and metadata["id"].isidentifier()
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        files = {path for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        digests = {
            path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest()
            for path in files - {variant / "metadata.json"}
        }
        read = {name: base64.b64decode(x) for name, x in metadata["digest"]["files"].items()}
        assert read == digests
    assert len({metadata["id"] for metadata in told}) == len(told)


def test_a_variant_has_the_functions_and_what_they_read():
    files = hub.contents()
    names = ast.literal_eval(files["__init__.py"].decode().rpartition("__all__ = ")[2])
    assert {*fastattn.__all__} >= {*names} - {*flash_attn.__all__}
    assert {*flash_attn.__all__} - {*names} == {"install", "uninstall"}
    assert {"BlockMask", "KVCache", "attention_varlen", "decode_attention"} <= {*names}
    assert not {"swap", "CausalGQAttention"} & {*names}
    assert {"kernels/launch/tuning/sm_90.json", "tuned/verdicts.json"} <= {*files}
    assert not [name for name in files if name.startswith(("models/", "modules/", "testing/"))]


@pytest.mark.parametrize("line", ["import fastattn.checks", "from .. import attention"])
def test_an_import_that_a_copy_would_not_find_is_refused(line, monkeypatch, tmp_path):
    modules = hub.modules()
    planted = tmp_path / "decode.py"
    planted.write_text(f"from . import inputs\n{line}\n")
    modules["fastattn.functional.decode"] = planted
    monkeypatch.setattr(hub, "modules", lambda: modules)
    with pytest.raises(ValueError, match=r"decode\.py:2 must import modules relatively"):
        hub.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_names_its_variants_and_replaces_nothing(tmp_path, capsys):
    assert hub.main([str(tmp_path)]) == 0
    wanted = [str(tmp_path / "build" / f"torch-{backend}") for backend in hub.BACKENDS]
    assert capsys.readouterr().out.split() == wanted
    with pytest.raises(SystemExit, match="2"):
        hub.main([str(tmp_path)])
    assert f"exists: '{wanted[0]}'" in capsys.readouterr().err
