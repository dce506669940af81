"""`fastattn info --doctor` finds what is missing, and says what to do."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from fastattn.cli import doctor
from fastattn.cli.main import main


def remedies() -> dict[str, str]:
    return {finding.about: finding.remedy for finding in doctor.examine()}


def test_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["info", "--doctor"]) == 0
    written = capsys.readouterr().out
    assert "! GPU: torch" in written and "    to do: " in written
    assert f"  numpy: {metadata.version('numpy')}" in written


def test_each_thing_that_is_missing_has_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "1.0")
    actual = remedies()
    actual.pop("GPU", None)
    assert not any(actual.values()), actual

    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "apt install gcc" in remedies()["C compiler"]
    monkeypatch.setenv("CC", "nothing")
    assert "CC=nothing is no program" in str(doctor.examine())

    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "TRITON_CACHE_DIR" in remedies()["cache of kernels"]
    assert "FASTATTN_CACHE_DIR" in remedies()["cache of results"]

    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert 'pip install ".[hf]" in a checkout' in remedies()["transformers"]


def test_the_report_counts_what_is_to_do() -> None:
    well, ill = doctor.Finding("a", "b"), doctor.Finding("c", "d", "e")
    assert doctor.describe([well]) == ["  a: b", "nothing to do"]
    assert doctor.describe([well, ill])[1:] == ["! c: d", "    to do: e", "1 to do"]
