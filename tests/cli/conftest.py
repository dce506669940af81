"""A short run of `fastattn train`, and the one line of a command that fails."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastattn.cli.main import main

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Café:\n    price = 3\n" * 20


QUICK = [
    *("--layers", "1", "--heads", "2", "--embed-dim", "16", "--context", "16", "--batch", "4"),
    *("--steps", "8", "--log-every", "2", "--eval-every", "4", "--save-every", "3"),
    *("--device", "cpu"),
]


@pytest.fixture(autouse=True)
def one_thread_in_subprocesses(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def quick() -> list[str]:
    """Options of a run of a second."""
    return QUICK


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, one_thread) -> Path:
    """A run of QUICK; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        arguments = ["train", "--text", str(folder / "text.txt"), "--out", str(folder / "run")]
        assert main([*arguments, *QUICK]) == 0
    return folder / "run"


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail; its one line, but for what training says as it begins."""

    def run_and_fail(*words: object, code: int = 1) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        written = capsys.readouterr()
        assert written.out == ""
        lines = written.err.splitlines()
        if lines[0].startswith("training a"):
            del lines[0]
        assert len(lines) == 1, written.err
        return lines[0].strip()

    return run_and_fail
