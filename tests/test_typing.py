"""The types that users see hold under mypy and under pyright's rules, and refuse what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PROGRAM = CHECKOUT / "tests" / "typing" / "user_program.py"
REFUSED = {
    number
    for number, line in enumerate(PROGRAM.read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# refused")
}


@pytest.fixture(scope="module")
def links() -> Path:
    """The package in the shape that it has when it is installed."""
    subprocess.run(["make", "links"], cwd=CHECKOUT, check=True, capture_output=True)
    return CHECKOUT / "build" / "links"


def test_mypy(links: Path) -> None:
    pytest.importorskip("mypy")
    # The settings and the cache are those of `make typecheck`, which has read the package already.
    settings = ["--config-file", "../../pyproject.toml", "--cache-dir", "../../.mypy_cache"]
    command = [sys.executable, "-m", "mypy", *settings, "--no-error-summary", str(PROGRAM)]
    done = subprocess.run(command, cwd=links, capture_output=True, text=True)
    lines = {int(x) for x in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert lines == REFUSED, done.stdout + done.stderr


def test_pyright(links: Path, tmp_path: Path) -> None:
    """Its basic mode. basedpyright comes with a node of its own, so nothing is downloaded."""
    pytest.importorskip("basedpyright")
    settings = {
        "include": [str(PROGRAM)],
        "extraPaths": [str(links)],
        "typeCheckingMode": "basic",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {x["range"]["start"]["line"] + 1 for x in found}
    assert lines == REFUSED, [(x["range"]["start"]["line"] + 1, x["message"]) for x in found]
